"""Token embedding and the output projection, over a vocabulary that is padded in memory only.

Tensor parallelism shards the vocabulary by rows: rank r holds ids [r * P / tp, (r + 1) * P / tp) of the padded
size P. Logits stay sharded; `VocabRange` says which ids a rank's columns are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split
from mt_core.nn.linear import Cut, LinearModule, column_parallel_linear, leave_tensor_parallel
from mt_core.nn.main_grad import with_main_gradient
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext


@dataclass(frozen=True)
class VocabRange:
    """Ids [start, stop) that a rank's rows or columns stand for, without padding."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """vocab_size rounded up to a multiple (make_vocab_size_divisible_by x tensor_model_parallel_size)."""
    return -(-vocab_size // multiple) * multiple


def vocab_range(vocab_size: int, padded: int, ctx: ParallelContext) -> VocabRange:
    """This rank's ids; empty for a rank that holds padding only."""
    share = padded // ctx.tp.size
    start = min(ctx.tp.rank * share, vocab_size)
    return VocabRange(start, min(start + share, vocab_size))


class VocabParallelEmbedding(LayoutModule):
    """Token embeddings: a table [vocab, hidden], sharded by rows."""

    weight: Tensor

    def __init__(
        self, vocab_size: int, hidden_size: int, ctx: ParallelContext, *, init: Init, divisible_by: int
    ) -> None:
        super().__init__(ctx)
        self.vocab_size = vocab_size
        layout = vocab_layout(vocab_size, hidden_size, init, divisible_by * ctx.tp.size)
        self.range = vocab_range(vocab_size, layout.padded.get(0, vocab_size), ctx)
        self.declare("weight", layout)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, H] (S sharded with sequence parallelism)"""
        if self.ctx.tp.size == 1:
            return F.embedding(ids, self.weight)
        # Ids of other ranks look up row 0 and are then zeroed, so that the sum over ranks has one term that is not 0.
        elsewhere = (ids < self.range.start) | (ids >= self.range.stop)
        embedded = F.embedding((ids - self.range.start).masked_fill(elsewhere, 0), self.weight)
        return leave_tensor_parallel(embedded.masked_fill(elsewhere[..., None], 0.0), self.ctx)


class VocabParallelOutput(LinearModule):
    """LM head: logits x W^T with W [vocab, hidden], sharded by rows."""

    cut: Cut = "output"

    def __init__(
        self, vocab_size: int, hidden_size: int, ctx: ParallelContext, *, init: Init, divisible_by: int
    ) -> None:
        super().__init__(ctx)
        self.multiply = column_parallel_linear
        self.vocab_size = vocab_size
        layout = vocab_layout(vocab_size, hidden_size, init, divisible_by * ctx.tp.size)
        self.range = vocab_range(vocab_size, layout.padded.get(0, vocab_size), ctx)
        self.declare("weight", layout)

    def forward(self, x: Tensor) -> Tensor:
        if self.multiply is column_parallel_linear:
            return project_to_vocab(x, self.weight, self.range, self.ctx)
        # A product of another kind expects whole multiples of rows.
        return self.multiply(x, self.weight, None, self.ctx)[..., : len(self.range)]


def project_to_vocab(x: Tensor, weight: Tensor, id_range: VocabRange, ctx: ParallelContext) -> Tensor:
    """[B, S, H] -> [B, S, ids of this rank], the first columns of a product with all rows of the weight.

    Rows of padding are multiplied too, since products are slow for numbers of columns that are not aligned (50,257
    ids). What they give lies between the rows of the result in memory, and is in none of them.
    """
    columns = len(id_range) if len(id_range) < len(weight) else None
    return column_parallel_linear(x, weight, None, ctx, columns)


def without_padding(weight: Tensor, id_range: VocabRange) -> Tensor:
    """The rows of `weight` that stand for ids, the first ones; all of them as it is."""
    return weight if len(weight) == len(id_range) else with_main_gradient(weight, lambda rows: rows[: len(id_range)])


def gather_logits(logits: Tensor, vocab_size: int, multiple: int, ctx: ParallelContext) -> Tensor:
    """[B, S, ids of this rank] -> [B, S, vocab] on every rank, for sampling; training never needs it."""
    if ctx.tp.size == 1:
        return logits
    # A rank with padding has fewer columns; an all-gather takes equal shapes.
    share = padded_vocab_size(vocab_size, multiple * ctx.tp.size) // ctx.tp.size
    padded = F.pad(logits, (0, share - logits.shape[-1]))
    # Padding is behind the last id, so it is at the end of the gathered vocabulary.
    return gather_copies(padded, -1 % logits.ndim, ctx.tp)[..., :vocab_size]


def vocab_layout(vocab_size: int, hidden_size: int, init: Init, multiple: int) -> ParameterLayout:
    """Rows [vocab, hidden], split over tp; padded in memory to a multiple."""
    padded = padded_vocab_size(vocab_size, multiple)
    return ParameterLayout(
        (vocab_size, hidden_size),
        init,
        (Split(dim=0, axis="tp"),),
        padded={0: padded} if padded != vocab_size else {},
    )
