"""Which range of its numbers a group's codes reach over: all of them, a percentile, or the one with the least error."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mt_ckpt.quantized.grids import Grid, Scales, full_range, in_groups, rounded

RangeMethod = Literal["max", "percentile", "mse"]
SHRINK = tuple(1.0 - step / 50 for step in range(26))
"""Parts of a group's range that are tried, from all to half of it."""


def chosen_scales(
    grid: Grid,
    weight: Tensor,
    method: RangeMethod,
    dtype: torch.dtype,
    largest: float,
    *,
    importance: Tensor | None = None,
    percentile: float = 99.9,
) -> Scales:
    """Scales of all groups of a weight [out, in] in fp32.

    dtype: of stored scales. largest: magnitude of the whole matrix. importance: [in], mean squares of the inputs, by
    which mse weighs the errors of columns; None: alike. percentile: of the magnitudes of a group.
    """
    groups = in_groups(weight, grid.size)
    if method == "max":
        return full_range(grid, groups, dtype, largest)
    if method == "percentile":
        share = percentile / 100
        low, high = groups.quantile(1 - share, dim=-1), groups.quantile(share, dim=-1)
        return grid.scales(low.clamp(max=0), high.clamp(min=0), dtype, largest)
    return _least_error(grid, groups, dtype, largest, importance)


def _least_error(grid: Grid, groups: Tensor, dtype: torch.dtype, largest: float, importance: Tensor | None) -> Scales:
    low, high = groups.amin(-1), groups.amax(-1)
    weights = torch.ones_like(groups[:1]) if importance is None else in_groups(importance[None], grid.size)
    best = torch.full_like(low, torch.inf)
    part = torch.ones_like(low)
    for shrink in SHRINK:
        scales = grid.scales(low * shrink, high * shrink, dtype, largest)
        error = ((rounded(grid, groups, scales) - groups).square_() * weights).sum(-1)
        better = error < best
        best, part = torch.where(better, error, best), torch.where(better, shrink, part)
    return grid.scales(low * part, high * part, dtype, largest)
