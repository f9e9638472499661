"""Balanced choice by Sinkhorn's iteration, as Megatron's `sinkhorn` router (Clark et al., S-BASE, 2022)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-4
EPSILON = 1e-8
MOST_ITERATIONS = 1000


def sinkhorn(logits: Tensor, total_tokens: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """exp(logits) with rows and columns scaled until each expert has the same share of the tokens.

    logits [T, E] of this rank's tokens; total_tokens: over all ranks that share the micro-batch, over which
    `sum_over_ranks` sums a tensor [E]. So the result does not depend on how the tokens are sharded.
    Stops when the columns' factors change by less than 1e-4 in the mean.
    """
    rows = (logits - logits.amax(-1, keepdim=True)).exp()  # a factor for each row changes nothing
    experts = logits.shape[1]
    column = torch.ones(experts, dtype=logits.dtype, device=logits.device)
    row = column.new_ones(len(logits))
    for _ in range(MOST_ITERATIONS):
        # [T]: each token gets the share 1 / total_tokens
        row = 1.0 / (total_tokens * (rows @ column + EPSILON))
        # [E]: each expert gets the share 1 / E
        scaled = 1.0 / (experts * (sum_over_ranks(row @ rows) + EPSILON))
        change = (scaled - column).abs().mean()
        column = scaled
        # The sum over ranks is the same number on all of them, so all leave the loop in the same iteration.
        if change <= TOLERANCE:
            break
    return rows * column * row[:, None]


def sinkhorn_weights(logits: Tensor, experts: Tensor) -> Tensor:
    """Weights [T, k]: the sigmoid for one expert a token, else the softmax over all experts."""
    scores = logits.sigmoid() if experts.shape[1] == 1 else logits.softmax(-1)
    return scores.gather(1, experts)
