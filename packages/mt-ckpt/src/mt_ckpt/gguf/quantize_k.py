"""K-quants: blocks of 256 whose sub-blocks have scales of a few bits. float32 [blocks, 256] to bytes of whole blocks,
by the algorithms of ggml's `quantize_q*_K`, which give the same bytes."""

from __future__ import annotations

import numpy as np

from mt_ckpt.gguf.scale_search import (
    WITH_IMPORTANCE,
    AffineFit,
    F,
    Trials,
    affine_codes,
    fit_affine,
    fit_positive,
    fit_symmetric,
    symmetric_codes,
    total,
)


def columns(x: np.ndarray, width: int) -> np.ndarray:
    """[width, sub-blocks]: element i of all sub-blocks together."""
    return np.ascontiguousarray(x.reshape(-1, width).T)


def bytes_of_half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [blocks] as fp16: its bytes [blocks, 2], and the value that is stored."""
    half = values.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(F)


# -- Q4_K and Q5_K -----------------------------------------------------------------------------------


def q4_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    head, codes = _eight_affine(x, importance, 15, Trials(-1.0, 0.1, 20))
    return np.concatenate([head, _packed_nibbles(codes)], axis=1)


def q5_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    head, codes = _eight_affine(x, importance, 31, Trials(-0.5, 0.1, 15))
    # Bit k of byte j: the fifth bit of element 32 k + j.
    high = np.packbits((codes >> 4).reshape(-1, 8, 32).swapaxes(1, 2), axis=2, bitorder="little")[..., 0]
    return np.concatenate([head, high, _packed_nibbles(codes & 15)], axis=1)


def _packed_nibbles(codes: np.ndarray) -> np.ndarray:
    """[blocks, 128] from codes [blocks, 256]: 32 bytes hold 64 elements, first the low halves."""
    parts = codes.reshape(-1, 4, 2, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(-1, 128)


def _eight_affine(
    x: np.ndarray, importance: np.ndarray | None, limit: int, trials: Trials
) -> tuple[np.ndarray, np.ndarray]:
    """The 16 bytes of scales and minima of each block, and the codes uint8 [blocks, 256]."""
    sub = columns(x, 32)
    weights = _weights(x, sub, importance)
    fit = fit_affine(sub, weights, limit, trials if importance is None else WITH_IMPORTANCE)
    if importance is None:
        d, dmin, scales, minima = _scales_by_largest(fit)
    else:
        d, dmin, scales, minima = _scales_by_search(fit, total(weights))
    (d_bytes, d), (dmin_bytes, dmin) = bytes_of_half(d), bytes_of_half(dmin)
    step = (d[:, None] * scales).reshape(-1)
    offset = (dmin[:, None] * minima).reshape(-1)
    codes = np.clip(np.rint((sub + offset) / step), F(0), F(limit))
    unscaled = step == 0
    if unscaled.any():
        codes[:, unscaled] = affine_codes(sub, fit, limit)[:, unscaled]
    packed = _packed_six_bits(scales.astype(np.uint8), minima.astype(np.uint8))
    return np.concatenate([d_bytes, dmin_bytes, packed], axis=1), codes.T.astype(np.uint8).reshape(-1, 256)


def _weights(x: np.ndarray, sub: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    if importance is None:
        return np.sqrt(total(sub * sub) / F(32)) + np.abs(sub)
    mean = F(2) * total(columns(x * x, 256)) / F(256)
    return columns(importance, 32) * np.sqrt(np.repeat(mean, 8) + sub * sub)


def _scales_by_largest(fit: AffineFit) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The largest scale of a block gets the code 63, and so does the largest minimum."""
    quantized = []
    for values in (fit.scale.reshape(-1, 8), fit.minimum.reshape(-1, 8)):
        high = np.maximum(values.max(axis=1), F(0))
        inverse = np.where(high > 0, F(63) / high, F(0))
        codes = np.rint(inverse[:, None] * values).astype(np.int32).astype(np.uint8)
        quantized.append((high / F(63), np.minimum(codes, 63).astype(F)))
    (d, scales), (dmin, minima) = quantized
    return d, dmin, scales, minima


def _scales_by_search(fit: AffineFit, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    by_block = columns(weights, 8)
    d, scales = fit_positive(columns(fit.scale, 8), by_block, 63)
    dmin, minima = fit_positive(columns(fit.minimum, 8), by_block, 63)
    return d, dmin, scales.T, minima.T


def _packed_six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """12 bytes: scales 0 to 3, minima 0 to 3 with two high bits of the others above them, low halves of the others."""
    scales, minima = scales & 63, minima & 63
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)


# -- Q6_K --------------------------------------------------------------------------------------------


def q6_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    sub = columns(x, 16)
    weights = sub * sub if importance is None else columns(importance, 16)
    fit = fit_symmetric(sub, weights, 32)
    by_block = fit.scale.reshape(-1, 16)
    signed = np.take_along_axis(by_block, np.argmax(np.abs(by_block), axis=1)[:, None], axis=1)
    empty = np.abs(signed[:, 0]) < F(1e-15)
    inverse = F(-128) / signed
    d_bytes, d = bytes_of_half((F(1) / inverse)[:, 0])
    scales = np.minimum(np.rint(inverse * by_block), F(127))
    step = (d[:, None] * scales).reshape(-1)
    codes = np.clip(np.rint(sub / step), F(-32), F(31)) + F(32)
    unscaled = step == 0
    if unscaled.any():
        codes[:, unscaled] = symmetric_codes(sub, fit, 32)[:, unscaled]
    stored = scales.astype(np.int8).view(np.uint8)
    blocks = np.concatenate([_packed_six_bit_codes(codes.T.astype(np.uint8)), stored, d_bytes], axis=1)
    blocks[empty] = 0
    return blocks


def _packed_six_bit_codes(codes: np.ndarray) -> np.ndarray:
    """[blocks, 192]: 128 bytes of four low bits, 64 of two high ones; each half of the block apart."""
    parts = codes.reshape(-1, 2, 4, 32)
    low = parts & 15
    nibbles = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    high = parts >> 4
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate([nibbles.reshape(-1, 128), pairs.reshape(-1, 64)], axis=1)
