"""Types with blocks of 32 (and IQ4_XS): float32 [blocks, elements of a block] to bytes of whole blocks, by the
algorithms of ggml's `quantize_*`, which give the same bytes."""

from __future__ import annotations

import numpy as np

from mt_ckpt.gguf.codebooks import IQ4_VALUES
from mt_ckpt.gguf.dequantize_floats import half_power_of_two
from mt_ckpt.gguf.quantize_k import bytes_of_half, columns
from mt_ckpt.gguf.scale_search import (
    SMALLEST,
    WITH_IMPORTANCE,
    F,
    affine_codes,
    fit_affine,
    fit_symmetric,
    largest,
    symmetric_codes,
    total,
)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """[blocks, 16] from codes uint8 [blocks, 32]: first half of the block in the low halves."""
    return codes[:, :16] | codes[:, 16:] << 4


def _inverse(values: np.ndarray) -> np.ndarray:
    return np.where(values != 0, F(1) / values, F(0))


def q8_0(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d = np.abs(x).max(axis=1) / F(127)
    scaled = x * _inverse(d)[:, None]
    # Halves away from zero.
    whole = np.trunc(scaled)
    codes = whole + np.where(np.abs(scaled - whole) >= F(0.5), np.sign(scaled), F(0))
    return np.concatenate([bytes_of_half(d)[0], codes.astype(np.int8).view(np.uint8)], axis=1)


# -- Q4_0, Q5_0, Q4_1, Q5_1 --------------------------------------------------------------------------


def q4_0(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes = _symmetric(x, importance, 8)
    return np.concatenate([d, _nibbles(codes)], axis=1)


def q5_0(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes = _symmetric(x, importance, 16)
    return np.concatenate([d, _fifth_bits(codes), _nibbles(codes & 15)], axis=1)


def q4_1(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    head, codes = _affine(x, importance, 15)
    return np.concatenate([head, _nibbles(codes)], axis=1)


def q5_1(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    head, codes = _affine(x, importance, 31)
    return np.concatenate([head, _fifth_bits(codes), _nibbles(codes & 15)], axis=1)


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _symmetric(x: np.ndarray, importance: np.ndarray | None, limit: int) -> tuple[np.ndarray, np.ndarray]:
    sub = columns(x, 32)
    if importance is not None:
        fit = fit_symmetric(sub, columns(importance, 32), limit)
        return bytes_of_half(fit.scale)[0], symmetric_codes(sub, fit, limit).T.astype(np.uint8)
    d = largest(sub)[0] / F(-limit)
    # Not rounded to even: what is added makes truncation round halves up.
    codes = np.minimum((sub * _inverse(d) + F(limit + 0.5)).astype(np.int8), 2 * limit - 1)
    return bytes_of_half(d)[0], codes.T.astype(np.uint8)


def _affine(x: np.ndarray, importance: np.ndarray | None, limit: int) -> tuple[np.ndarray, np.ndarray]:
    sub = columns(x, 32)
    if importance is not None:
        fit = fit_affine(sub, columns(importance, 32), limit, WITH_IMPORTANCE)
        d, low, codes = fit.scale, -fit.minimum, affine_codes(sub, fit, limit)
    else:
        low = sub.min(axis=0)
        d = (sub.max(axis=0) - low) / F(limit)
        codes = np.minimum(((sub - low) * _inverse(d) + F(0.5)).astype(np.int8), limit)
    head = np.concatenate([bytes_of_half(d)[0], bytes_of_half(low)[0]], axis=1)
    return head, codes.T.astype(np.uint8)


# -- IQ4_NL and IQ4_XS -------------------------------------------------------------------------------

RANGE = 256
"""Twice the largest magnitude of a value, and a little more."""


def _nearest_codes() -> np.ndarray:
    """Code of the value nearest to k / 2, for k from -RANGE to RANGE; at equal distance the higher one."""
    midpoints_doubled = IQ4_VALUES[:-1] + IQ4_VALUES[1:]
    return np.searchsorted(midpoints_doubled, np.arange(-RANGE, RANGE + 1), side="right").astype(np.uint8)


NEAREST_CODES = _nearest_codes()
NEAREST_VALUES = IQ4_VALUES[NEAREST_CODES]


def _table_index(scaled: np.ndarray) -> np.ndarray:
    # Twice a midpoint is an integer: the integer part of twice the element decides.
    doubled = np.floor(np.add(scaled, scaled, out=scaled), out=scaled)
    return np.clip(np.nan_to_num(doubled, copy=False), F(-RANGE), F(RANGE)).astype(np.int32) + RANGE


def _iq4_scales(sub: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The scale of each block [blocks] of sub [32, blocks]."""
    signed, magnitude = largest(sub)
    scale, best = np.zeros_like(signed), np.zeros_like(signed)
    lowest = IQ4_VALUES[0]
    # The first trial maps the largest element to the lowest value; the others lie around that.
    for number, inverse in enumerate([F(1) / (-signed / lowest), *((F(k) + lowest) / signed for k in range(-7, 8))]):
        values = NEAREST_VALUES[_table_index(sub * inverse)]
        weighted = weights * values
        products, squares = total(weighted * sub), total(weighted * values)
        better = (squares > 0) & ((products * products > best * squares) | (number == 0))
        np.copyto(scale, products / squares, where=better)
        np.copyto(best, scale * products, where=better)
    scale[magnitude < SMALLEST] = 0
    return scale


def _iq4_weights(x: np.ndarray, sub: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    if importance is None:
        return sub * sub
    width = x.shape[1]
    mean = total(columns(x * x, width)) * F(2.0 / width)
    return columns(importance, 32) * np.sqrt(np.repeat(mean, width // 32) + sub * sub)


def iq4_nl(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    sub = columns(x, 32)
    scale = _iq4_scales(sub, _iq4_weights(x, sub, importance))
    codes = NEAREST_CODES[_table_index(sub * _inverse(scale))]
    return np.concatenate([bytes_of_half(scale)[0], _nibbles(np.ascontiguousarray(codes.T))], axis=1)


def iq4_xs(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    sub = columns(x, 32)
    scale = _iq4_scales(sub, _iq4_weights(x, sub, importance)).reshape(-1, 8)
    signed = np.take_along_axis(scale, np.argmax(np.abs(scale), axis=1)[:, None], axis=1)
    d = -signed / F(32)
    levels = np.clip(np.rint(_inverse(d) * scale), F(-32), F(31))
    codes = NEAREST_CODES[_table_index(sub * _inverse(d * levels).reshape(-1))]
    packed = _nibbles(np.ascontiguousarray(codes.T)).reshape(len(x), 128)
    return np.concatenate([bytes_of_half(d[:, 0])[0], _packed_levels((levels + 32).astype(np.uint16)), packed], axis=1)


def _packed_levels(levels: np.ndarray) -> np.ndarray:
    """A word with the two high bits of each of eight levels, and 4 bytes of their low bits."""
    high = np.bitwise_or.reduce(levels >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1).astype("<u2")
    low = (levels & 15).astype(np.uint8)
    return np.concatenate([high.view(np.uint8).reshape(-1, 2), low[:, ::2] | low[:, 1::2] << 4], axis=1)


# -- MXFP4 -------------------------------------------------------------------------------------------

MIDPOINTS_DOUBLED = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
"""Between neighbours among twice the magnitudes of E2M1."""


def mxfp4(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    largest_magnitude = np.abs(x).max(axis=1)
    logarithm = np.log2(largest_magnitude.astype(np.float64)).astype(F)
    exponent = np.where(largest_magnitude > 0, np.floor(logarithm) + F(125), F(0)).astype(np.int32).astype(np.uint8)
    half_scale, magnitude = half_power_of_two(exponent)[:, None], np.abs(x)
    codes = np.zeros(x.shape, np.uint8)
    for midpoint in MIDPOINTS_DOUBLED:
        codes += magnitude > F(midpoint) * half_scale
    # The sign is the fourth bit; zero has none.
    codes |= ((x < 0) & (codes > 0)).astype(np.uint8) << 3
    return np.concatenate([exponent[:, None], _nibbles(codes)], axis=1)
