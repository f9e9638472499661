"""Token dropping: which of a rank's tokens are kept if experts have a capacity. Shapes: T tokens, k experts of each."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from mt_moe.permutation import count_occurrences


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Tokens that an expert accepts from a rank: factor times the mean, rounded up (Megatron's rule)."""
    return math.ceil(tokens * topk / num_experts * factor)


def keep_within(
    experts: Tensor, weights: Tensor, num_experts: int, capacity: int, policy: Literal["probs", "position"]
) -> Tensor:
    """[T, k] bool: for each expert its first `capacity` tokens are kept, or those with the highest weights.

    Ties keep the earlier token.
    """
    # [T * k]
    chosen = experts.flatten()
    turn = _by_weight(weights) if policy == "probs" else torch.arange(chosen.numel(), device=chosen.device)
    # argsort is stable, so within an expert the choices keep the order of `turn`.
    order = turn[chosen[turn].argsort(stable=True)]  # by expert, within one by turn
    counts = count_occurrences(chosen, num_experts)
    first = counts.cumsum(0) - counts
    # Rank of each choice among those of its expert, in sorted order.
    place = torch.arange(chosen.numel(), device=chosen.device) - first[chosen[order]]
    kept = torch.empty_like(chosen, dtype=torch.bool)
    # Back to the order of tokens.
    kept[order] = place < capacity
    return kept.view_as(experts)


def _by_weight(weights: Tensor) -> Tensor:
    return weights.detach().flatten().argsort(descending=True, stable=True)
