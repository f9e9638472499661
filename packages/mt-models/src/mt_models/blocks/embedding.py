"""Replicated embedding tables (positions, token types), and logits from tied token embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.embedding import VocabParallelEmbedding, padded_vocab_size, project_to_vocab
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, zeros
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


# -- tied output: the LM head of MLM models and of T5 ------------------------------------------------


class TiedOutput(LayoutModule):
    """x E^T + b with the token embeddings E [vocab, hidden]; it owns b [vocab], which is sharded as E's rows are.

    trained: whether the optimizer updates b.
    """

    bias: Tensor | None

    def __init__(
        self, vocab_size: int, ctx: ParallelContext, *, bias: bool, divisible_by: int, trained: bool = True
    ) -> None:
        super().__init__(ctx)
        padded = padded_vocab_size(vocab_size, divisible_by * ctx.tp.size)
        filler = {0: padded} if padded != vocab_size else {}
        layout = ParameterLayout((vocab_size,), zeros, (Split(dim=0, axis="tp"),), padded=filler, trained=trained)
        self.declare("bias", layout if bias else None)

    def forward(self, x: Tensor, words: VocabParallelEmbedding) -> Tensor:
        """[B, S, H] -> [B, S, ids of this rank]"""
        logits = project_to_vocab(x, words.weight, words.range, words.ctx)
        # Padding rows of the bias are at the end of the last ranks' shards.
        # project_to_vocab has left them out of the logits.
        return logits if self.bias is None else logits + self.bias[: len(words.range)]
