"""Products of scaled matrices: a [M, K] times b [N, K] transposed -> [M, N] in a wider format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core._torch_compat import ScalingRecipe, scaled_mm
from mt_core.nn.fp8.casts import Granularity, Scaled

SCALES_PER_WORD = 4
"""cuBLAS expects the scales of 128 x 128 blocks along K in multiples of so many."""

RECIPES: Mapping[Granularity, ScalingRecipe] = {
    Granularity.TENSOR: ScalingRecipe.TENSOR,
    Granularity.ROW: ScalingRecipe.ROW,
    Granularity.ROW_BLOCK: ScalingRecipe.BLOCK_1X128,
    Granularity.SQUARE_BLOCK: ScalingRecipe.BLOCK_128X128,
}


class Product(Protocol):
    """fast: sums may keep fewer bits than fp32 on the way (Hopper's fast accumulation), as forward passes allow."""

    def __call__(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor: ...


def emulated_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """What the FP8 numbers stand for, multiplied and summed in fp32. Runs anywhere; the reference."""
    return (a.decode() @ b.decode().t()).to(dtype)  # [M, K] x [K, N]


def torch_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """torch's scaled_mm: cuBLAS or CUTLASS on a GPU of compute capability 8.9 and up; blocks on Hopper alone."""
    blocks = Granularity.ROW_BLOCK in (a.granularity, b.granularity)
    return scaled_mm(
        a.data.contiguous(),
        # scaled_mm takes b column by column: K next to one another for both operands.
        b.data.contiguous().t(),
        (_left_scale(a), _right_scale(b)),
        (RECIPES[a.granularity], RECIPES[b.granularity]),
        dtype,
        fast=fast and not blocks,
    )


def _left_scale(a: Scaled) -> Tensor:
    """[] | [M, 1] | [M, K / 128] with rows next to one another in memory"""
    # cuBLAS reads the scales of 1 x 128 blocks with M next to one another; the shape stays [M, K / 128].
    return a.scale.t().contiguous().t() if a.granularity is Granularity.ROW_BLOCK else a.scale


def _right_scale(b: Scaled) -> Tensor:
    """[] | [1, N] | as the left one | [K / 128 rounded up to 4, N / 128] with rows next to one another in memory"""
    if b.granularity is Granularity.ROW:
        return b.scale.t().contiguous()
    if b.granularity is Granularity.ROW_BLOCK:
        return _left_scale(b)
    if b.granularity is Granularity.SQUARE_BLOCK:
        return F.pad(b.scale, (0, -b.scale.shape[1] % SCALES_PER_WORD)).t()  # [N / 128, K / 128]
    return b.scale
