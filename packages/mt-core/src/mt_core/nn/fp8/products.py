"""Products of scaled matrices: a [M, K] times b [N, K] transposed -> [M, N] in a wider format."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.fp8.casts import Granularity, Scaled

SCALES_PER_WORD = 4
"""cuBLAS wants the scales of 128 x 128 blocks along K in multiples of so many."""


class Product(Protocol):
    """fast: sums may keep fewer bits than fp32 on the way (Hopper's fast accumulation), as forward passes allow."""

    def __call__(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor: ...


def emulated_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """What the FP8 numbers stand for, multiplied and summed in fp32. Runs anywhere; the reference."""
    return (a.decode() @ b.decode().t()).to(dtype)


def torch_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """torch's scaled_mm: cuBLAS or CUTLASS on a GPU of compute capability 8.9 and up; blocks on Hopper alone."""
    blocks = Granularity.ROW_BLOCK in (a.granularity, b.granularity)
    return F.scaled_mm(
        a.data.contiguous(),
        b.data.contiguous().t(),
        _left_scale(a),
        _recipe(a),
        _right_scale(b),
        _recipe(b),
        output_dtype=dtype,
        use_fast_accum=fast and not blocks,
    )


def _recipe(operand: Scaled) -> F.ScalingType:
    return {
        Granularity.TENSOR: F.ScalingType.TensorWise,
        Granularity.ROW: F.ScalingType.RowWise,
        Granularity.ROW_BLOCK: F.ScalingType.BlockWise1x128,
        Granularity.SQUARE_BLOCK: F.ScalingType.BlockWise128x128,
    }[operand.granularity]


def _left_scale(a: Scaled) -> Tensor:
    """[] | [M, 1] | [M, K / 128] with rows next to one another in memory"""
    return a.scale.t().contiguous().t() if a.granularity is Granularity.ROW_BLOCK else a.scale


def _right_scale(b: Scaled) -> Tensor:
    """[] | [1, N] | as the left one | [K / 128 rounded up to 4, N / 128] with rows next to one another in memory"""
    if b.granularity is Granularity.ROW:
        return b.scale.t().contiguous()
    if b.granularity is Granularity.ROW_BLOCK:
        return _left_scale(b)
    if b.granularity is Granularity.SQUARE_BLOCK:
        return F.pad(b.scale, (0, -b.scale.shape[1] % SCALES_PER_WORD)).t()
    return b.scale
