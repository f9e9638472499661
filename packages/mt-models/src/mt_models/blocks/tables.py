"""Learned vectors looked up by number: positions, token types."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import split_to
from mt_core.parallel.context import ParallelContext


class LearnedTable(LayoutModule):
    """A vector for each of `rows` numbers: [rows, hidden], the same on every tensor-parallel rank."""

    weight: Tensor

    def __init__(self, rows: int, hidden_size: int, init: Init, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((rows, hidden_size), init))

    def forward(self, numbers: Tensor) -> Tensor:
        """[...] int64 -> [..., hidden]"""
        return F.embedding(numbers, self.weight)


def like_word_vectors(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Vectors of whole sequences [B, S, H] as a word embedding gives them: with sequence parallelism this rank's
    piece of S. The gradient of the whole comes back on every rank."""
    return split_to(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else x
