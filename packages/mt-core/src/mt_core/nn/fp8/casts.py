"""A matrix in FP8 with its scales: one for all of it, one a row, or one a block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.fp8.formats import scale_of, to_fp8

BLOCK = 128
ALIGNMENT = 16
"""Scaled products of GPUs take lengths of contracted dimensions that this divides."""


class Granularity(Enum):
    """What shares a scale, for a matrix [rows, length] that is contracted along its length."""

    TENSOR = "tensor"
    """scale []"""
    ROW = "row"
    """scale [rows, 1]"""
    ROW_BLOCK = "1x128"
    """scale [rows, length / 128]"""
    SQUARE_BLOCK = "128x128"
    """scale [rows / 128, length / 128]"""

    @property
    def multiple(self) -> int:
        """What a contracted length is padded to, with zeros."""
        return BLOCK if self in (Granularity.ROW_BLOCK, Granularity.SQUARE_BLOCK) else ALIGNMENT


@dataclass(frozen=True)
class Scaled:
    """data [rows, length] in FP8 stands for data * scale; scale is fp32 and spreads as `granularity` says."""

    data: Tensor
    scale: Tensor
    granularity: Granularity

    def decode(self) -> Tensor:
        """[rows, length] fp32, up to its rounding what the FP8 numbers stand for."""
        return self.data.float() * self._spread()

    def _spread(self) -> Tensor:
        if self.granularity is Granularity.SQUARE_BLOCK:
            return self.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return self.scale.repeat_interleave(BLOCK, 1) if self.granularity is Granularity.ROW_BLOCK else self.scale


def cast_tensor(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """x [rows, length] by a scale that is known: []."""
    return Scaled(to_fp8(x, scale, dtype), scale, Granularity.TENSOR)


def cast_rows(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], each row by its largest magnitude."""
    x = padded(x, Granularity.ROW.multiple)  # zeros, which change no magnitude
    scale = scale_of(x.abs().amax(1, keepdim=True).float(), dtype, margin)  # [rows, 1]
    return Scaled(to_fp8(x, scale, dtype), scale, Granularity.ROW)


def cast_row_blocks(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], every 128 numbers of a row by their largest magnitude (DeepSeek-V3, 2024, section 3.3)."""
    x = padded(x, BLOCK)
    blocks = x.unflatten(1, (-1, BLOCK))  # [rows, blocks, 128]
    scale = scale_of(blocks.abs().amax(2).float(), dtype, margin)  # [rows, blocks]
    return Scaled(to_fp8(blocks, scale[..., None], dtype).flatten(1), scale, Granularity.ROW_BLOCK)


def cast_square_blocks(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], multiples of 128 both, every 128 x 128 numbers by their largest magnitude."""
    blocks = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [row blocks, 128, column blocks, 128]
    scale = scale_of(blocks.abs().amax((1, 3)).float(), dtype, margin)  # [row blocks, column blocks]
    data = to_fp8(blocks, scale[:, None, :, None], dtype)
    return Scaled(data.flatten(2).flatten(0, 1), scale, Granularity.SQUARE_BLOCK)  # [rows, length]


def padded(x: Tensor, multiple: int) -> Tensor:
    """x [rows, length] with zeros behind each row, up to a multiple."""
    missing = -x.shape[1] % multiple
    if missing == 0:
        return x
    if x.element_size() == 1:  # bytes, as torch does not pad FP8
        return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
    return F.pad(x, (0, missing))
