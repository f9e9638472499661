"""Replicated embedding tables: positions, token types."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import split_to
from mt_core.parallel.context import ParallelContext


class LearnedTable(LayoutModule):
    """An embedding table [rows, hidden], replicated on every tensor-parallel rank."""

    weight: Tensor

    def __init__(self, rows: int, hidden_size: int, init: Init, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        # No partial gradient: whole sequences are looked up on every rank, also with sequence parallelism (see below).
        self.declare("weight", ParameterLayout((rows, hidden_size), init))

    def forward(self, numbers: Tensor) -> Tensor:
        """[...] int64 -> [..., hidden]"""
        return F.embedding(numbers, self.weight)


def like_token_embeddings(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Embeddings of whole sequences [B, S, H] in the form of token embeddings: with sequence parallelism this rank's
    slice of S. Backward all-gathers, so that every rank gets the gradient of the whole."""
    return split_to(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else x
