"""Casts to MXFP8 and NVFP4 in plain torch: small blocks with scales of 8 bits.

MXFP8 (OCP Microscaling Formats 1.0; Mishra et al., Recipes for Pre-training LLMs with MXFP8, 2025): 32 FP8 numbers
share a power of two. It is rounded up, so that no number of a block is beyond the largest one of the format.

NVFP4 (NVIDIA, Pretraining Large Language Models with NVFP4, 2025): 16 numbers of E2M1, or 16 x 16 of a weight, share a
scale in e4m3, and the whole matrix a scale in fp32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.fp8_casts import E2M1_BLOCK, E4M3, MX_BLOCK, Granularity, Scaled, padded

_BIAS = 127
"""Bias of the exponents of fp32 and of E8M0."""
_NOT_A_NUMBER = 255
LARGEST_E2M1 = 6.0
LARGEST_SCALED = LARGEST_E2M1 * 448.0
"""What the largest magnitude of a matrix becomes in NVFP4: the largest number with the largest scale of a block."""


# -- MXFP8 ----------------------------------------------------------------------------------------------


def cast_mx(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], every 32 numbers of a row by a power of two. A block that is not finite becomes NaN."""
    blocks = padded(x, MX_BLOCK).unflatten(1, (-1, MX_BLOCK)).float()  # [rows, blocks, 32]
    limit = torch.finfo(dtype).max
    exponents = exponents_above(blocks.abs().amax(2) / (limit / 2.0**margin))  # [rows, blocks]
    # NVIDIA's kernels take 1 for the smallest exponent, whose inverse is beyond e4m3's range in any case.
    inverse = torch.where(exponents == 0, 1.0, torch.exp2((_BIAS - exponents).float()))
    data = (blocks * inverse[..., None]).clamp(-limit, limit).to(dtype).flatten(1)
    return Scaled(data, exponents.to(torch.uint8).view(torch.float8_e8m0fnu), Granularity.MX_BLOCK)


def exponents_above(x: Tensor) -> Tensor:
    """The biased exponent, int32, of the smallest power of two that is not below x >= 0, an fp32 number. 255 (NaN in
    E8M0) for what is not finite."""
    bits = x.view(torch.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    # Below the normal numbers of fp32 the fraction is a multiple of 2^-149: up to 0x400000 it is at most 2^-127.
    is_above = (fraction > 0) & ~((exponent == 0) & (fraction <= 0x400000))
    return torch.where(x.isfinite(), (exponent + is_above.int()).clamp(max=_NOT_A_NUMBER - 1), _NOT_A_NUMBER)


# -- NVFP4 ----------------------------------------------------------------------------------------------


def cast_nvfp4(x: Tensor, amax: Tensor, noise: Tensor | None = None, *, square: bool = False) -> Scaled:
    """x [rows, length] in E2M1, two numbers a byte, the first in the low bits.

    amax: [] fp32, the largest magnitude of the whole matrix; one that is not finite makes everything NaN.
    noise: as x, uniform in [0, 1): a number is rounded up with the probability of its distance from the lower one;
    None: rounded to nearest, ties to even. square: blocks of 16 x 16, of which x has multiples.
    """
    x = padded(x, E2M1_BLOCK)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    # In the order and precision of NVIDIA's reference: fp32 throughout.
    encode = torch.where(amax == 0.0, 1.0, (LARGEST_SCALED / amax).clamp(max=torch.finfo(torch.float32).max))
    blocks = x.float().unflatten(1, (-1, E2M1_BLOCK))  # [rows, blocks, 16]
    scale = (_block_amax(blocks, square) / LARGEST_E2M1 * encode).clamp(max=448.0).to(E4M3)  # [rows, blocks]
    factor = (1.0 / (scale.float() * (1.0 / encode))).clamp(max=torch.finfo(torch.float32).max)
    scaled = (blocks * factor[..., None]).clamp(-LARGEST_E2M1, LARGEST_E2M1).flatten(1)
    codes = e2m1_codes(scaled, None if noise is None else padded(noise, E2M1_BLOCK))
    return Scaled(pack_nibbles(codes), scale, Granularity.E2M1_BLOCK, amax / LARGEST_SCALED)


def _block_amax(blocks: Tensor, square: bool) -> Tensor:
    """[rows, blocks, 16] -> [rows, blocks]; square: the largest of 16 rows, at each of them."""
    amax = blocks.abs().amax(2)
    if not square:
        return amax
    return amax.unflatten(0, (-1, E2M1_BLOCK)).amax(1).repeat_interleave(E2M1_BLOCK, 0)


def e2m1_codes(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Codes (uint8, 0 to 15) of x, within [-6, 6]: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and 8 more for a negative sign."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    steps = magnitude / step
    # The remainder is exact; a sum of steps and noise would be rounded.
    whole = steps.round() if noise is None else steps.floor() + (noise < steps.frac())
    rounded = whole * step
    codes = torch.where(rounded < 2.0, rounded * 2.0, torch.where(rounded < 4.0, rounded + 2.0, rounded / 2.0 + 4.0))
    # NaN has no code; it is in the scale of the matrix.
    return codes.nan_to_num(0.0).to(torch.uint8) + 8 * x.signbit().to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[rows, length] uint8 below 16 -> [rows, length / 2], the first of two in the low bits."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


# -- random Hadamard transform --------------------------------------------------------------------------

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Drawn once, by NVIDIA; one for all layers and steps, as the paper found to be enough."""


@lru_cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """[16, 16] fp32, orthogonal: rows of a Hadamard matrix with random signs, by 1/4."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < E2M1_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.tensor(SIGNS, device=device)[:, None] * matrix / E2M1_BLOCK**0.5


def transformed(x: Tensor) -> Tensor:
    """x [rows, length] with every 16 numbers of a row multiplied by the matrix, in the dtype of x; zeros behind each
    row up to a multiple of 16. A product of two matrices transformed so along their common dimension is the same."""
    x = padded(x, E2M1_BLOCK)
    spread = x.float().unflatten(1, (-1, E2M1_BLOCK)) @ hadamard_matrix(x.device)
    return spread.flatten(1).to(x.dtype)


# -- random numbers by place ----------------------------------------------------------------------------


def noise_at(seed: int, rows: Tensor, columns: Tensor) -> Tensor:
    """[rows, columns] fp32, uniform in [0, 1), multiples of 2^-24: a function of the seed and of the two int64 numbers
    of a place alone, so that every device and every layout draws the same."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    by_row = _mixed(rows ^ low)  # [rows]
    mixed = _mixed((by_row[:, None] + (columns * 0x9E3779B1)[None]) & 0xFFFFFFFF ^ high)
    return (mixed >> 8).float() * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers (held in int64) whose bits all depend on all bits of x."""
    # Factors below 2^31: products stay within int64.
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    x = (x ^ (x >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    return x ^ (x >> 15)
