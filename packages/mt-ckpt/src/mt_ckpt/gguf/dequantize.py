"""Values of the legacy types and K-quants of GGUF.

Each function takes bytes [blocks, bytes of a block] and gives float32 [blocks, elements of a block], by the formulas
of ggml's `dequantize_row_*`.
"""

from __future__ import annotations

import numpy as np


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 16-bit float at byte `at` of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


# Blocks of 32 elements. d, m: fp16; q: the packed integers, see `nibbles`.
# Q8_0: d | 32 signed q. x = d q.
# Q4_0: d | 16 bytes of q. x = d (q - 8). Q4_1: d | m | 16 bytes. x = d q + m.
# Q5_0: d | 4 bytes of fifth bits | 16 bytes. x = d (q - 16). Q5_1: d | m | 4 | 16. x = d q + m.
def q8_0(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * nibbles(blocks[:, 4:]).astype(np.float32) + halves(blocks, 2)


def _with_fifth_bit(blocks: np.ndarray, at: int) -> np.ndarray:
    """Four low bits from the nibbles after byte at + 4, the fifth of element j from bit j of the 32 at `at`."""
    bits = np.ascontiguousarray(blocks[:, at : at + 4]).view("<u4")
    fifth = (bits >> np.arange(32, dtype=np.uint32)) & 1
    return (nibbles(blocks[:, at + 4 :]) | (fifth << 4).astype(np.uint8)).astype(np.float32)


def q5_0(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * (_with_fifth_bit(blocks, 2) - 16)


def q5_1(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * _with_fifth_bit(blocks, 4) + halves(blocks, 2)


# -- blocks of 256 elements, whose sub-blocks have scales (and minima) of a few bits -----------------


def _times_scales(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """scales [blocks, n], one for each 256 / n elements of values [blocks, 256]."""
    return np.repeat(scales, values.shape[1] // scales.shape[1], axis=1) * values


def _minus_minima(values: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Shapes as in `_times_scales`."""
    return values - np.repeat(minima, values.shape[1] // minima.shape[1], axis=1)


def two_bits(packed: np.ndarray) -> np.ndarray:
    """[blocks, 256] from 64 bytes: 32 bytes hold 128 elements, first the lowest two bits of all 32."""
    parts = [packed[:, 32 * half : 32 * half + 32] >> shift & 3 for half in range(2) for shift in (0, 2, 4, 6)]
    return np.concatenate(parts, axis=1)


def _four_bits(packed: np.ndarray) -> np.ndarray:
    """[blocks, 256] from 128 bytes: 32 bytes hold 64 elements, first the low halves of all 32."""
    return np.concatenate([nibbles(packed[:, at : at + 32]) for at in range(0, 128, 32)], axis=1)


def _single_bits(packed: np.ndarray) -> np.ndarray:
    """[blocks, 256] from 32 bytes: first the lowest bit of all 32."""
    return np.concatenate([packed >> bit & 1 for bit in range(8)], axis=1)


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of six bits from 12 bytes, float32 [blocks, 8] each.

    Bytes 0 to 3 hold four scales and 4 to 7 four minima; their two high bits, and the halves of bytes 8 to 11, are the
    others.
    """
    # Scales 0 to 3: low six bits of bytes 0 to 3. Scales 4 to 7: low half of bytes 8 to 11, and the two high bits of
    # bytes 0 to 3 above it. Minima: the same with bytes 4 to 7 and the high halves. Shifts bind closer than & and |.
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def q2_k(blocks: np.ndarray) -> np.ndarray:
    """A byte holds scale and minimum of 16 elements, four bits each."""
    # 16 scale bytes | 64 of q | d | dmin. x = d s q - dmin m.
    scales, minima = (blocks[:, :16] & 15).astype(np.float32), (blocks[:, :16] >> 4).astype(np.float32)
    values = _times_scales(halves(blocks, 80) * scales, two_bits(blocks[:, 16:80]).astype(np.float32))
    return _minus_minima(values, halves(blocks, 82) * minima)


def q3_k(blocks: np.ndarray) -> np.ndarray:
    """Two low bits, a high one; 16 scales of six bits around 32: first four bits of all, in bytes 8 to 11 two more."""
    # 32 bytes of high bits | 64 of low bits | 12 of scales | d. x = d (s - 32) (q - 4).
    packed = blocks[:, 96:108]
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (nibbles(packed[:, :8]) | high << 4).astype(np.float32) - 32
    values = two_bits(blocks[:, 32:96]) | _single_bits(blocks[:, :32]) << 2
    return _times_scales(halves(blocks, 108) * scales, values.astype(np.float32) - 4)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    # d | dmin | 12 of scales and minima | 128 of q. x = d s q - dmin m.
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    values = _times_scales(halves(blocks, 0) * scales, _four_bits(blocks[:, 16:]).astype(np.float32))
    return _minus_minima(values, halves(blocks, 2) * minima)


def q5_k(blocks: np.ndarray) -> np.ndarray:
    # d | dmin | 12 of scales and minima | 32 of fifth bits | 128 of low bits. x = d s q - dmin m.
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    quants = _four_bits(blocks[:, 48:]) | _single_bits(blocks[:, 16:48]) << 4
    values = _times_scales(halves(blocks, 0) * scales, quants.astype(np.float32))
    return _minus_minima(values, halves(blocks, 2) * minima)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """Two halves of 128 elements: four low bits (of 64 bytes first the low halves), two high bits, and a signed scale
    for each 16 elements."""
    # 128 bytes of low bits | 64 of high bits | 16 signed scales | d. x = d s (q - 32).
    low = np.concatenate([nibbles(blocks[:, at : at + 64]) for at in (0, 64)], axis=1)
    values = (low | two_bits(blocks[:, 128:192]) << 4).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _times_scales(halves(blocks, 208) * scales, values)


def q8_k(blocks: np.ndarray) -> np.ndarray:
    """The scale has 32 bits; the last 32 bytes are sums that only products need."""
    scale = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    return scale * blocks[:, 4:260].view(np.int8).astype(np.float32)
