"""MXFP4, the dtype of the published experts (OCP Microscaling Formats, 2023).

Along a row, 32 numbers of 4 bits (sign, two bits of exponent, one of mantissa) have one factor, a power of two whose
8-bit exponent is stored (E8M0: 2^(e - 127), 255 for NaN). A byte holds two numbers, the first in its low half.
"""

from __future__ import annotations

import torch
from torch import Tensor

# E2M1: exponent bias 1, the two smallest magnitudes without an implicit leading 1. By the three low bits.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., G, 16] and scales [..., G], both uint8 -> [..., 32 G] in bf16, which holds every such number."""
    # A look-up of whole bytes, [..., G, 16] -> [..., G, 16, 2]. int: an index of uint8 would be read as a mask.
    numbers = _numbers_of_bytes(blocks.device)[blocks.int()].flatten(-2)  # [..., G, 32]
    # The dtype converts 255 to NaN, which 2.0 ** (scales - 127) would not.
    factors = scales.view(torch.float8_e8m0fnu).to(torch.float32)
    return (numbers * factors[..., None]).flatten(-2).to(torch.bfloat16)


def _numbers_of_bytes(device: torch.device) -> Tensor:
    """[256, 2] fp32: the two numbers of each byte."""
    halves = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    # The low four bits are the first number of a row.
    return torch.stack((halves[byte % 16], halves[byte // 16]), -1)
