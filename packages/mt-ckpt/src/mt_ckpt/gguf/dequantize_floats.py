"""Values of the ternary, one-bit and 4-bit floating-point types of GGUF: bytes [blocks, bytes of a block] to float32
[blocks, elements of a block], by the formulas of ggml's `dequantize_row_*`."""

from __future__ import annotations

import numpy as np

from mt_ckpt.gguf.dequantize import halves, nibbles, two_bits

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice the values of E2M1, by their codes; scales are halved in return."""


def _ternary_digits(packed: np.ndarray, digits: int) -> np.ndarray:
    """[blocks, digits * n] of -1, 0, 1 from n bytes [blocks, n]; first the highest digit of all bytes."""
    # A byte holds the digits as a fraction of 256 in base 3: times 3^k, the next digit is the integer part of the rest
    # times 3. Products wrap around at 256, which drops the digits before.
    shifted = [packed * np.uint8(3**digit) for digit in range(digits)]
    return np.concatenate([(part.astype(np.uint16) * 3 >> 8).astype(np.int8) - 1 for part in shifted], axis=1)


def tq1_0(blocks: np.ndarray) -> np.ndarray:
    # 32 bytes of 5 digits | 16 of 5 | 4 of 4 | d. x = d q.
    parts = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    digits = [_ternary_digits(blocks[:, start:end], number) for start, end, number in parts]
    return halves(blocks, 52) * np.concatenate(digits, axis=1).astype(np.float32)


def tq2_0(blocks: np.ndarray) -> np.ndarray:
    # 64 bytes of q | d. x = d (q - 1).
    return halves(blocks, 64) * (two_bits(blocks[:, :64]).astype(np.float32) - 1)


def q1_0(blocks: np.ndarray) -> np.ndarray:
    # d | 16 bytes, a bit each element, lowest first. x = d or -d.
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    scale = halves(blocks, 0)
    return np.where(bits == 1, scale, -scale)


def q2_0(blocks: np.ndarray) -> np.ndarray:
    # d | 16 bytes of four q each, lowest bits first. x = d (q - 1).
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3
    return halves(blocks, 0) * (codes.reshape(-1, 64).astype(np.float32) - 1)


def half_power_of_two(exponents: np.ndarray) -> np.ndarray:
    """2^(e - 128) of E8M0 codes (uint8), half of what they mean; exact, the two smallest as subnormal numbers."""
    codes = exponents.astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(codes, 1)
    return np.where(codes < 2, small, (codes - 1) << 23).astype(np.uint32).view(np.float32)


def mxfp4(blocks: np.ndarray) -> np.ndarray:
    # e | 16 bytes of q. x = 2^(e - 127) E2M1(q).
    return half_power_of_two(blocks[:, :1]) * E2M1_DOUBLED[nibbles(blocks[:, 1:])]


def half_of_ue4m3(codes: np.ndarray) -> np.ndarray:
    """Half of the value of unsigned E4M3 codes (uint8); 0x7f, which is no number, gives 0 as in ggml."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), normal) * np.float32(0.5)
    return np.where((codes == 0) | (codes == 0x7F), np.float32(0), values).astype(np.float32)


def nvfp4(blocks: np.ndarray) -> np.ndarray:
    # Four scales | four times 8 bytes of 16 elements each. x = s E2M1(q).
    scales = half_of_ue4m3(blocks[:, :4])[:, :, None]
    codes = nibbles(blocks[:, 4:].reshape(-1, 8)).reshape(-1, 4, 16)
    return (scales * E2M1_DOUBLED[codes]).reshape(-1, 64)
