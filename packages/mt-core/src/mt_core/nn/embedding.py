"""Token embedding and the output projection, over a vocabulary that is padded in memory only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split
from mt_core.parallel.context import ParallelContext


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """vocab_size rounded up to a multiple (make_vocab_size_divisible_by x tensor_model_parallel_size)."""
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(LayoutModule):
    """Rows of a table [vocab, hidden], divided by rows."""

    weight: Tensor

    def __init__(
        self, vocab_size: int, hidden_size: int, ctx: ParallelContext, *, init: Init, divisible_by: int
    ) -> None:
        super().__init__(ctx)
        self.vocab_size = vocab_size
        self.declare("weight", vocab_layout(vocab_size, hidden_size, init, divisible_by * ctx.tp.size))

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] -> [batch, sequence, hidden]"""
        return F.embedding(ids, self.weight)


class VocabParallelOutput(LayoutModule):
    """Logits over the true vocabulary: x W^T with W [vocab, hidden], divided by rows."""

    weight: Tensor

    def __init__(
        self, vocab_size: int, hidden_size: int, ctx: ParallelContext, *, init: Init, divisible_by: int
    ) -> None:
        super().__init__(ctx)
        self.vocab_size = vocab_size
        self.declare("weight", vocab_layout(vocab_size, hidden_size, init, divisible_by * ctx.tp.size))

    def forward(self, x: Tensor) -> Tensor:
        return project_to_vocab(x, self.weight, self.vocab_size)


def project_to_vocab(x: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """[..., hidden] -> [..., vocab]. Rows of padding are left out of the product, not masked after it."""
    return F.linear(x, weight if len(weight) == vocab_size else weight[:vocab_size])


def vocab_layout(vocab_size: int, hidden_size: int, init: Init, multiple: int) -> ParameterLayout:
    padded = padded_vocab_size(vocab_size, multiple)
    return ParameterLayout(
        (vocab_size, hidden_size),
        init,
        (Split(dim=0, axis="tp"),),
        padded={0: padded} if padded != vocab_size else {},
    )
