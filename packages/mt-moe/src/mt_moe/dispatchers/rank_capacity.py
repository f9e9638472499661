"""Bounds on the rows of a rank, which need no number from the device, and what exceeds them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mt_moe.dispatchers.interface import ExpertPlacement
from mt_moe.routing.result import Routing


def rank_capacity(tokens: int, routing: Routing, place: ExpertPlacement, factor: float | None) -> int:
    """Rows of `tokens` tokens for the experts of one rank: factor times the mean, rounded up, but not more than there
    can be; None: as many as there can be."""
    # A token's experts are distinct, so a rank gets it at most once for each expert that it holds.
    most = tokens * min(routing.topk, place.num_local)
    return most if factor is None else min(most, math.ceil(tokens * routing.topk / place.ep.size * factor))


def clip_counts(counts: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Rows of experts [..., n] -> those among the first `room` of all n, and whether any is not: [] bool"""
    ends = counts.cumsum(-1)
    # counts 3 4 2, room 5: ends 3 7 9, clamped 3 5 5, differences 3 2 0.
    fitting = ends.clamp(max=room).diff(dim=-1, prepend=torch.zeros_like(ends[..., :1]))
    return fitting, (ends[..., -1] > room).any()


def invalidate(weights: Tensor, overflow: Tensor) -> Tensor:
    """NaN in place of all weights if rows were left out, so that the step fails instead of going on without them."""
    return weights.masked_fill(overflow, math.nan)
