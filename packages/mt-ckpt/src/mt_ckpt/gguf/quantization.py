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
            return torch.from_numpy(data).view(self.dtype)
        return torch.from_numpy(self.dequantize(data.reshape(-1, self.num_bytes))).reshape(-1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 16-bit float at byte `at` of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


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


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 elements in two halves of 128: four low bits, two high bits, a signed scale for each 16 elements."""
    halves = []
    for half in range(2):
        low = blocks[:, 64 * half : 64 * half + 64]
        high = blocks[:, 128 + 32 * half : 128 + 32 * half + 32]
        lows = [low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4]
        halves += [part | ((high >> 2 * i & 3) << 4) for i, part in enumerate(lows)]
    values = np.concatenate(halves, axis=1).astype(np.float32) - 32
    scales = np.repeat(np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32), 16, axis=1)
    return _halves(blocks, 208) * scales * values


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    2: BlockType("Q4_0", 32, 18, dequantize=q4_0),
    3: BlockType("Q4_1", 32, 20, dequantize=q4_1),
    6: BlockType("Q5_0", 32, 22, dequantize=q5_0),
    7: BlockType("Q5_1", 32, 24, dequantize=q5_1),
    8: BlockType("Q8_0", 32, 34, dequantize=q8_0),
    14: BlockType("Q6_K", 256, 210, dequantize=q6_k),
}
"""Number of a type in the file -> what it is."""
