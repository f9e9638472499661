"""Element types of GGUF. A quantized type packs blocks of elements of a row with their scale.

Each function takes bytes [blocks, bytes of a block] and gives float32 [blocks, elements of a block], by the formulas
of ggml's `dequantize_row_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Dequantize = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class BlockType:
    """A block of `elements` takes `num_bytes`. dtype: of the tensor that is made of it."""

    name: str
    elements: int
    num_bytes: int
    dtype: torch.dtype = torch.float32
    dequantize: Dequantize | None = None

    def to_tensor(self, data: np.ndarray) -> Tensor:
        """[elements] from the bytes of whole blocks."""
        if self.dequantize is None:
            # No byte swap: the file is little-endian, and so is the machine.
            return torch.from_numpy(data).view(self.dtype)
        return torch.from_numpy(self.dequantize(data.reshape(-1, self.num_bytes))).reshape(-1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 16-bit float at byte `at` of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


# Blocks of 32 elements. d, m: fp16; q: the packed integers, see `_nibbles`.
# Q8_0: d | 32 signed q. x = d q.
# Q4_0: d | 16 bytes of q. x = d (q - 8). Q4_1: d | m | 16 bytes. x = d q + m.
# Q5_0: d | 4 bytes of fifth bits | 16 bytes. x = d (q - 16). Q5_1: d | m | 4 | 16. x = d q + m.
def q8_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _halves(blocks, 2)


def _with_fifth_bit(blocks: np.ndarray, at: int) -> np.ndarray:
    """Four low bits from the nibbles after byte at + 4, the fifth of element j from bit j of the 32 at `at`."""
    bits = np.ascontiguousarray(blocks[:, at : at + 4]).view("<u4")
    fifth = (bits >> np.arange(32, dtype=np.uint32)) & 1
    return (_nibbles(blocks[:, at + 4 :]) | (fifth << 4).astype(np.uint8)).astype(np.float32)


def q5_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * (_with_fifth_bit(blocks, 2) - 16)


def q5_1(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * _with_fifth_bit(blocks, 4) + _halves(blocks, 2)


# -- blocks of 256 elements, whose sub-blocks have scales (and minima) of a few bits -----------------


def _times_scales(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """scales [blocks, n], one for each 256 / n elements of values [blocks, 256]."""
    return np.repeat(scales, values.shape[1] // scales.shape[1], axis=1) * values


def _minus_minima(values: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Shapes as in `_times_scales`."""
    return values - np.repeat(minima, values.shape[1] // minima.shape[1], axis=1)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """[blocks, 256] from 64 bytes: 32 bytes hold 128 elements, first the lowest two bits of all 32."""
    parts = [packed[:, 32 * half : 32 * half + 32] >> shift & 3 for half in range(2) for shift in (0, 2, 4, 6)]
    return np.concatenate(parts, axis=1)


def _four_bits(packed: np.ndarray) -> np.ndarray:
    """[blocks, 256] from 128 bytes: 32 bytes hold 64 elements, first the low halves of all 32."""
    return np.concatenate([_nibbles(packed[:, at : at + 32]) for at in range(0, 128, 32)], axis=1)


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
    values = _times_scales(_halves(blocks, 80) * scales, _two_bits(blocks[:, 16:80]).astype(np.float32))
    return _minus_minima(values, _halves(blocks, 82) * minima)


def q3_k(blocks: np.ndarray) -> np.ndarray:
    """Two low bits, a high one; 16 scales of six bits around 32: first four bits of all, in bytes 8 to 11 two more."""
    # 32 bytes of high bits | 64 of low bits | 12 of scales | d. x = d (s - 32) (q - 4).
    packed = blocks[:, 96:108]
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (_nibbles(packed[:, :8]) | high << 4).astype(np.float32) - 32
    values = _two_bits(blocks[:, 32:96]) | _single_bits(blocks[:, :32]) << 2
    return _times_scales(_halves(blocks, 108) * scales, values.astype(np.float32) - 4)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    # d | dmin | 12 of scales and minima | 128 of q. x = d s q - dmin m.
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    values = _times_scales(_halves(blocks, 0) * scales, _four_bits(blocks[:, 16:]).astype(np.float32))
    return _minus_minima(values, _halves(blocks, 2) * minima)


def q5_k(blocks: np.ndarray) -> np.ndarray:
    # d | dmin | 12 of scales and minima | 32 of fifth bits | 128 of low bits. x = d s q - dmin m.
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    quants = _four_bits(blocks[:, 48:]) | _single_bits(blocks[:, 16:48]) << 4
    values = _times_scales(_halves(blocks, 0) * scales, quants.astype(np.float32))
    return _minus_minima(values, _halves(blocks, 2) * minima)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """Two halves of 128 elements: four low bits (of 64 bytes first the low halves), two high bits, and a signed scale
    for each 16 elements."""
    # 128 bytes of low bits | 64 of high bits | 16 signed scales | d. x = d s (q - 32).
    low = np.concatenate([_nibbles(blocks[:, at : at + 64]) for at in (0, 64)], axis=1)
    values = (low | _two_bits(blocks[:, 128:192]) << 4).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _times_scales(_halves(blocks, 208) * scales, values)


def q8_k(blocks: np.ndarray) -> np.ndarray:
    """The scale has 32 bits; the last 32 bytes are sums that only products need."""
    scale = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    return scale * blocks[:, 4:260].view(np.int8).astype(np.float32)


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    2: BlockType("Q4_0", 32, 18, dequantize=q4_0),
    3: BlockType("Q4_1", 32, 20, dequantize=q4_1),
    6: BlockType("Q5_0", 32, 22, dequantize=q5_0),
    7: BlockType("Q5_1", 32, 24, dequantize=q5_1),
    8: BlockType("Q8_0", 32, 34, dequantize=q8_0),
    10: BlockType("Q2_K", 256, 84, dequantize=q2_k),
    11: BlockType("Q3_K", 256, 110, dequantize=q3_k),
    12: BlockType("Q4_K", 256, 144, dequantize=q4_k),
    13: BlockType("Q5_K", 256, 176, dequantize=q5_k),
    14: BlockType("Q6_K", 256, 210, dequantize=q6_k),
    15: BlockType("Q8_K", 256, 292, dequantize=q8_k),
}
"""Number of a type in the file -> what it is."""
