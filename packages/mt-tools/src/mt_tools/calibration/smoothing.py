"""Factors of the features that a matrix reads: SmoothQuant's even out inputs, AWQ's protect columns."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_ckpt.quantized.grids import Grid, full_range, in_groups, rounded
from mt_tools.calibration.statistics import InputStatistics

SMALLEST = 1e-5
TRIED = 20
"""Exponents that AWQ tries, from 0 in steps of 1/20."""


def smoothquant_factors(weight: Tensor, inputs: InputStatistics, alpha: float) -> Tensor:
    """SmoothQuant (arXiv 2211.10438): max |x_j|^alpha / max |W_j|^(1 - alpha), [in]. Columns are multiplied by them,
    and inputs divided."""
    columns = weight.abs().amax(0).clamp(min=SMALLEST)
    factors = inputs.largest.clamp(min=SMALLEST).pow(alpha) / columns.pow(1 - alpha)
    return torch.where(inputs.largest > 0, factors.clamp(min=SMALLEST), torch.ones_like(factors))


def awq_factors(weight: Tensor, inputs: InputStatistics, grid: Grid, dtype: torch.dtype) -> Tensor:
    """AWQ (arXiv 2306.00978): mean |x_j|^r / w_j^(1 - r), where w_j is the mean of |W_ij| relative to the largest of
    its group, and r the one of TRIED whose rounded matrix changes the outputs least.

    The error of outputs is that of the matrix over the inputs seen, by their second moments.
    """
    assert inputs.moments is not None
    groups = in_groups(weight.abs(), grid.size)
    relative = (groups / groups.amax(-1, keepdim=True).clamp(min=SMALLEST)).flatten(1).mean(0)
    best, least = torch.ones_like(relative), torch.inf
    for number in range(TRIED):
        factors = _awq_candidate(inputs.mean_sizes, relative, number / TRIED)
        scaled = weight * factors
        scaled_groups = in_groups(scaled, grid.size)
        scales = full_range(grid, scaled_groups, dtype, scaled.abs().amax().item())
        difference = (rounded(grid, scaled_groups, scales).flatten(1) - scaled) / factors
        error = ((difference @ inputs.moments) * difference).sum().item()
        if error < least:
            best, least = factors, error
    return best


def _awq_candidate(sizes: Tensor, relative: Tensor, exponent: float) -> Tensor:
    factors = (sizes.pow(exponent) / (relative.pow(1 - exponent) + 1e-4)).clamp(min=1e-4)
    return factors / (factors.amax() * factors.amin()).sqrt()


def with_factors(inputs: InputStatistics, factors: Tensor) -> None:
    """Statistics of inputs that are divided by factors."""
    if inputs.moments is not None:
        inputs.moments /= factors[:, None] * factors
    inputs.squares /= factors.square()
    inputs.total /= factors
    inputs.largest /= factors
