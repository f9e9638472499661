"""Values of the IQ types of GGUF, whose codes are numbers of vectors in a codebook: bytes [blocks, bytes of a block] to
float32 [blocks, elements of a block], by the formulas of ggml's `dequantize_row_*`."""

from __future__ import annotations

import numpy as np

from mt_ckpt.gguf.codebooks import IQ4_VALUES, codebook
from mt_ckpt.gguf.dequantize import halves, nibbles

DELTA = np.float32(0.125)
"""By which the values of the one-bit types are shifted, up or down."""


def _words(blocks: np.ndarray, start: int, end: int, kind: str) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:end]).view(kind)


def _signs(bits: np.ndarray) -> np.ndarray:
    """[..., 8] of 1 and -1 from bytes [...], lowest bit first."""
    return np.where(np.unpackbits(bits[..., None], axis=-1, bitorder="little") == 0, np.float32(1), np.float32(-1))


def _with_parity(index: np.ndarray) -> np.ndarray:
    """A byte of signs from its seven low bits (uint8): the number of negative signs is even."""
    folded = index ^ index >> 4
    folded ^= folded >> 2
    return index | (folded ^ folded >> 1) << 7


def _of_four_signs(words: np.ndarray) -> np.ndarray:
    """[blocks, n, 4, 8] from words [blocks, n]: four times seven bits, lowest first."""
    index = words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & 127
    return _signs(_with_parity(index.astype(np.uint8)))


def _product(scales: np.ndarray, vectors: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """scales [blocks, n], vectors and signs of blocks * 256 elements."""
    shape = (*scales.shape, -1)
    return (scales[..., None] * vectors.reshape(shape) * signs.reshape(shape)).reshape(len(scales), -1)


def iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    # d | 8 times: 4 bytes of codes, 28 bits of signs and 4 of scale.
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    scales = halves(blocks, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    return _product(scales, codebook("IQ2_XXS")[codes], _of_four_signs(words[..., 1]))


def _scales_of_16(packed: np.ndarray) -> np.ndarray:
    """[blocks, 2 n]: low and high half of each byte."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1).astype(np.float32)


def iq2_xs(blocks: np.ndarray) -> np.ndarray:
    # d | 32 words of 9 bits of code and 7 of signs | 8 bytes of scales.
    words = _words(blocks, 2, 66, "<u2")
    scales = halves(blocks, 0) * (np.float32(0.5) + _scales_of_16(blocks[:, 66:])) * np.float32(0.25)
    signs = _signs(_with_parity((words >> 9).astype(np.uint8)))
    return _product(scales, codebook("IQ2_XS")[words & 511], signs)


def iq2_s(blocks: np.ndarray) -> np.ndarray:
    # d | 32 bytes of codes | 32 of signs | 8 with two more bits of four codes | 8 of scales.
    scales = halves(blocks, 0) * (np.float32(0.5) + _scales_of_16(blocks[:, 74:])) * np.float32(0.25)
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3).reshape(-1, 32)
    codes = blocks[:, 2:34].astype(np.uint16) | high.astype(np.uint16) << 8
    return _product(scales, codebook("IQ2_S")[codes], _signs(blocks[:, 34:66]))


def iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    # d | 64 bytes of codes | 8 words of 28 bits of signs and 4 of scale.
    words = _words(blocks, 66, 98, "<u4")
    scales = halves(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _product(scales, codebook("IQ3_XXS")[blocks[:, 2:66]], _of_four_signs(words))


def iq3_s(blocks: np.ndarray) -> np.ndarray:
    # d | 64 bytes of codes | 8 with a ninth bit of eight codes | 32 of signs | 4 of scales.
    scales = halves(blocks, 0) * (1 + 2 * _scales_of_16(blocks[:, 106:]))
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    codes = blocks[:, 2:66].astype(np.uint16) | high << 8
    return _product(scales, codebook("IQ3_S")[codes], _signs(blocks[:, 74:106]))


def _shifted(scales: np.ndarray, vectors: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """scales [blocks, n, 1] times (vectors + delta); negative: where delta is, of scales' shape or finer."""
    delta = np.where(negative, -DELTA, DELTA)[..., None]
    values = vectors.reshape(*negative.shape, -1) + delta
    return (scales.reshape(*scales.shape[:2], 1) * values.reshape(*scales.shape[:2], -1)).reshape(len(scales), -1)


def iq1_s(blocks: np.ndarray) -> np.ndarray:
    # d | 32 bytes of codes | 8 words: four times three more bits of a code, 3 bits of scale, the sign of delta.
    words = _words(blocks, 34, 50, "<u2")
    scales = halves(blocks, 0) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    high = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7).reshape(-1, 32)
    codes = blocks[:, 2:34].astype(np.uint16) | high << 8
    return _shifted(scales[..., None], codebook("IQ1_S")[codes], words >> 15 == 1)


def iq1_m(blocks: np.ndarray) -> np.ndarray:
    # 32 bytes of codes | 16 of halves: three more bits of a code, the sign of delta | 4 words: four times 3 bits of
    # scale, and a quarter of d, lowest first, in the high bits.
    words = _words(blocks, 48, 56, "<u2")
    bits = (words & 0xF000) >> np.array([12, 8, 4, 0], dtype=np.uint16)
    scale = np.bitwise_or.reduce(bits, axis=1).view("<f2").astype(np.float32)[:, None]
    parts = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7).reshape(-1, 16)
    scales = scale * (2 * parts + 1).astype(np.float32)
    high = (blocks[:, 32:48, None] >> np.array([0, 4], dtype=np.uint8)).reshape(-1, 32)
    codes = blocks[:, :32].astype(np.uint16) | (high & 7).astype(np.uint16) << 8
    # Two vectors of 8 to a scale, each with its own delta.
    return _shifted(scales[..., None], codebook("IQ1_S")[codes], (high & 8).reshape(-1, 16, 2) != 0)


def iq4_nl(blocks: np.ndarray) -> np.ndarray:
    # d | 16 bytes of codes. x = d value.
    return halves(blocks, 0) * IQ4_VALUES[nibbles(blocks[:, 2:])]


def iq4_xs(blocks: np.ndarray) -> np.ndarray:
    # d | a word with two high bits of eight scales | 4 bytes of their low bits | 128 of codes. x = d (s - 32) value.
    high = _words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = _scales_of_16(blocks[:, 4:8]) + (high << 4).astype(np.float32) - 32
    values = IQ4_VALUES[nibbles(blocks[:, 8:].reshape(-1, 16))].reshape(len(blocks), 8, 32)
    return ((halves(blocks, 0) * scales)[..., None] * values).reshape(len(blocks), -1)
