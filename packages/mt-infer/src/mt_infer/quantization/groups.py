"""Numbers in 8 or 4 bits, with a scale for each group of consecutive ones along the last dimension.

int8, fp8 (e4m3): value = stored x scale, where the largest of a group is the largest that can be stored.
int4: value = stored x scale + low, stored from 0 to 15; four in a word of 16 bits, the first in the lowest. They are a
quarter of the group apart, so that equal bits of consecutive words are multiplied by consecutive inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX, INT4_LEVELS, INT4_PER_WORD = 127, 15, 4
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# By format: int8 [..., columns]; the bits of fp8 as uint8 [..., columns]; words of int4 as int16 [..., columns / 4].
Stored = tuple[Tensor, ...]
"""Bytes [..., columns] (uint8 or int8), scales [..., groups] in fp32, and for int4 lows [..., groups]."""


@dataclass(frozen=True)
class GroupFormat:
    """quantize: [..., groups, size] in fp32 -> Stored with the group dimensions kept; dequantize: its inverse."""

    quantize: Callable[[Tensor], Stored]
    dequantize: Callable[..., Tensor]
    bits: int


def scale_of(x: Tensor, largest: float) -> Tensor:
    """[..., groups, 1]; 1 for a group of zeros."""
    # x [..., groups, size]. Symmetric: zero stays zero, and no offset is stored.
    scale = x.abs().amax(-1, keepdim=True) / largest
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_int8(x: Tensor) -> Stored:
    scale = scale_of(x, INT8_MAX)
    # -127 ... 127; -128 is not used. round() takes halves to even.
    return (x / scale).round().to(torch.int8), scale


def dequantize_scaled(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale


def quantize_fp8(x: Tensor) -> Stored:
    scale = scale_of(x, FP8_MAX)
    # As bytes: few operations on a device or in a store support the dtype.
    return (x / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantize_fp8(values: Tensor, scale: Tensor) -> Tensor:
    return values.view(torch.float8_e4m3fn).float() * scale


def quantize_int4(x: Tensor) -> Stored:
    # Asymmetric: 16 levels are few, and a group's smallest and largest are both met.
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / INT4_LEVELS
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    stored = ((x - low) / scale).round().clamp(0, INT4_LEVELS).to(torch.uint8)
    # Example, a group of 8 numbers n0 ... n7 in 2 words: word 0 has n0, n2, n4, n6 from its lowest bits on, word 1 has
    # n1, n3, n5, n7. The lowest bits of both words are the consecutive n0 and n1.
    quarters = stored.chunk(INT4_PER_WORD, dim=-1)
    # Added up in int32, up to 65535; the conversion to int16 keeps the bits.
    words = sum(quarter.int() << 4 * place for place, quarter in enumerate(quarters))
    assert isinstance(words, Tensor)
    return words.to(torch.int16), scale, low


def dequantize_int4(values: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    # The shift of int16 is arithmetic and fills in sign bits; & 15 removes them.
    stored = torch.cat([values >> 4 * place & 15 for place in range(INT4_PER_WORD)], dim=-1)
    return stored.float() * scale + low


FORMATS = {
    "int8": GroupFormat(quantize_int8, dequantize_scaled, 8),
    "int4": GroupFormat(quantize_int4, dequantize_int4, 4),
    "fp8": GroupFormat(quantize_fp8, dequantize_fp8, 8),
}


def quantize(x: Tensor, name: str, group: int) -> Stored:
    """[..., columns]; the last group may be shorter, and is filled up with its last number."""
    columns = x.shape[-1]
    filled = x.float()
    # The last number repeated: smallest, largest and scale of the group are those of its real numbers.
    if missing := -columns % group:
        filled = torch.cat((filled, filled[..., -1:].expand(*filled.shape[:-1], missing)), dim=-1)
    # [..., columns] -> [..., groups, size]
    values, *scales = FORMATS[name].quantize(filled.unflatten(-1, (-1, group)))
    # values [..., stored columns], scales and lows [..., groups]
    return (values.flatten(-2), *(scale.squeeze(-1) for scale in scales))


def dequantize(stored: Stored, name: str, group: int, columns: int) -> Tensor:
    """[..., columns] in fp32"""
    values, *scales = stored
    # For int4 the last dimension is words, a quarter of the group.
    grouped = values.unflatten(-1, (scales[0].shape[-1], -1))
    return FORMATS[name].dequantize(grouped, *(scale[..., None] for scale in scales)).flatten(-2)[..., :columns]
