"""Searches for the scales of quantized blocks, as ggml does them: trial scales around the one that maps the largest
element to the largest code, each followed by the weighted least-squares fit for the codes that it gives.

Arrays are float32 [n, blocks]: element i of all blocks lies together, so that sums over a block add one row after the
other. That is the order in which ggml adds them, and the fastest one here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

F = np.float32
SMALLEST = F(1e-15)
"""Blocks whose elements are all smaller count as zero."""


def total(values: np.ndarray) -> np.ndarray:
    """Sums over the elements of each block, in their order, in single precision."""
    return np.add.reduce(values, axis=0)


def largest(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first element of the largest magnitude of each block, with and without its sign."""
    positions = np.argmax(np.abs(x), axis=0)
    signed = np.take_along_axis(x, positions[None], axis=0)[0]
    return signed, np.abs(signed)


# -- codes around zero: x = scale * code -------------------------------------------------------------


@dataclass(frozen=True)
class SymmetricFit:
    """scale [blocks]: 0 for a block of zeros. inverse [blocks]: of the scale that gave the codes."""

    scale: np.ndarray
    inverse: np.ndarray
    zero: np.ndarray


def fit_symmetric(x: np.ndarray, weights: np.ndarray, limit: int) -> SymmetricFit:
    """Scales for codes -limit to limit - 1, by the weighted squared error (make_qx_quants)."""
    signed, magnitude = largest(x)
    buffers = _Buffers(x.shape)
    weighted = weights * x
    inverse = F(-limit) / signed
    products, squares = buffers.symmetric_sums(x, weights, weighted, inverse, limit)
    scale = np.where(squares != 0, products / squares, F(0))
    best = scale * products
    for step in (*range(-9, 0), *range(1, 10)):
        trial = -(F(limit) + F(0.1) * F(step)) / signed
        products, squares = buffers.symmetric_sums(x, weights, weighted, trial, limit)
        better = (squares > 0) & (products * products > best * squares)
        np.copyto(scale, products / squares, where=better)
        np.copyto(best, scale * products, where=better)
        np.copyto(inverse, trial, where=better)
    zero = magnitude < SMALLEST
    scale[zero] = 0
    return SymmetricFit(scale, inverse, zero)


def symmetric_codes(x: np.ndarray, fit: SymmetricFit, limit: int) -> np.ndarray:
    """The codes of the search, plus limit; 0 in blocks of zeros."""
    codes = np.clip(np.rint(fit.inverse * x), F(-limit), F(limit - 1)) + F(limit)
    codes[:, fit.zero] = 0
    return codes


class _Buffers:
    """Memory for the arrays of a trial: allocated once, small enough to stay in the processor's cache."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.codes, self.other, self.third = (np.empty(shape, F) for _ in range(3))

    def symmetric_sums(
        self, x: np.ndarray, weights: np.ndarray, weighted: np.ndarray, inverse: np.ndarray, limit: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sums of w x code and w code code."""
        codes, other = self.codes, self.other
        np.multiply(x, inverse, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, F(-limit), F(limit - 1), out=codes)
        products = total(np.multiply(weighted, codes, out=other))
        np.multiply(weights, codes, out=other)
        return products, total(np.multiply(other, codes, out=other))

    def affine_codes(self, x: np.ndarray, inverse: np.ndarray, minimum: np.ndarray, limit: int) -> np.ndarray:
        codes = self.codes
        np.subtract(x, minimum, out=codes)
        np.multiply(codes, inverse, out=codes)
        np.rint(codes, out=codes)
        return np.clip(codes, F(0), F(limit), out=codes)

    def affine_error(
        self, x: np.ndarray, weights: np.ndarray, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray
    ) -> np.ndarray:
        """Sums of w (scale code + minimum - x)^2."""
        other = self.other
        np.multiply(codes, scale, out=other)
        np.add(other, minimum, out=other)
        np.subtract(other, x, out=other)
        np.multiply(other, other, out=other)
        return total(np.multiply(other, weights, out=other))


# -- codes from zero: x = scale * code - minimum -----------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """Inverse scales (first + step * k + limit) / (max - min), for k = 0 to number."""

    first: float
    step: float
    number: int

    def __iter__(self) -> Iterator[np.float32]:
        return (F(self.first) + F(self.step) * F(k) for k in range(self.number + 1))


WITH_IMPORTANCE = Trials(-0.9, 0.05, 36)


@dataclass(frozen=True)
class AffineFit:
    """scale, minimum [blocks]: x = scale * code - minimum. inverse, low: those that gave the codes."""

    scale: np.ndarray
    minimum: np.ndarray
    inverse: np.ndarray
    low: np.ndarray
    flat: np.ndarray


def fit_affine(x: np.ndarray, weights: np.ndarray, limit: int, trials: Trials) -> AffineFit:
    """Scales and minima for codes 0 to limit, by the weighted squared error (make_qkx2_quants, make_qkx3_quants)."""
    buffers = _Buffers(x.shape)
    low, high = np.minimum(x.min(axis=0), F(0)), x.max(axis=0)
    flat, first_low = high <= low, low.copy()
    sum_w, sum_x = total(weights), total(np.multiply(weights, x, out=buffers.other))
    inverse = F(limit) / (high - low)
    scale, used_low = F(1) / inverse, low.copy()
    best = buffers.affine_error(x, weights, buffers.affine_codes(x, inverse, low, limit), scale, low)
    for offset in trials:
        trial = (offset + F(limit)) / (high - low)
        codes, other = buffers.affine_codes(x, trial, low, limit), buffers.other
        sum_l = total(np.multiply(weights, codes, out=other))
        sum_l2 = total(np.multiply(other, codes, out=buffers.third))
        sum_xl = total(np.multiply(other, x, out=other))
        fitted, fitted_low, valid = _solve(sum_w, sum_x, sum_l, sum_l2, sum_xl)
        error = buffers.affine_error(x, weights, codes, fitted, fitted_low)
        better = valid & (error < best)
        np.copyto(used_low, low, where=better)
        np.copyto(inverse, trial, where=better)
        np.copyto(best, error, where=better)
        np.copyto(scale, fitted, where=better)
        np.copyto(low, fitted_low, where=better)
    scale[flat], low[flat] = 0, first_low[flat]
    return AffineFit(scale, -low, inverse, used_low, flat)


def _solve(
    sum_w: np.ndarray, sum_x: np.ndarray, sum_l: np.ndarray, sum_l2: np.ndarray, sum_xl: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale and minimum of the weighted regression of x on the codes, and where it has a solution."""
    determinant = sum_w * sum_l2 - sum_l * sum_l
    scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
    low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
    positive = low > 0  # zero has to be representable
    np.copyto(scale, sum_xl / sum_l2, where=positive)
    low[positive] = 0
    return scale, low, determinant > 0


def affine_codes(x: np.ndarray, fit: AffineFit, limit: int) -> np.ndarray:
    """The codes of the search; 0 in blocks whose elements are all equal."""
    codes = np.clip(np.rint((x - fit.low) * fit.inverse), F(0), F(limit))
    codes[:, fit.flat] = 0
    return codes


# -- positive codes of scales: x = scale * code, x >= 0 -------------------------------------------------


def fit_positive(x: np.ndarray, weights: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale [blocks] and codes [n, blocks] from 0 to limit of numbers that are not negative (make_qp_quants)."""
    high = np.maximum(x.max(axis=0), F(0))
    zero = high < SMALLEST
    inverse = _best_inverse(x, weights, high, limit)
    codes = np.minimum(np.rint(inverse * x), F(limit))
    codes[:, zero] = 0
    weighted = weights * x
    products, squares = total(weighted * codes), total(weights * codes * codes)
    for _ in range(5):
        for i in range(len(x)):
            products, squares = _changed_code(i, x, weights, codes, products, squares, limit)
    scale = np.where(squares > 0, products / squares, F(0))
    scale[zero] = 0
    return scale, codes


def _best_inverse(x: np.ndarray, weights: np.ndarray, high: np.ndarray, limit: int) -> np.ndarray:
    inverse = F(limit) / high
    best = _weighted_error(x, weights, inverse, np.rint(inverse * x))
    for step in (-4, -3, -2, -1, 1, 2, 3, 4):
        trial = (F(0.1) * F(step) + F(limit)) / high
        error = _weighted_error(x, weights, trial, np.minimum(np.rint(trial * x), F(limit)))
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(inverse, trial, where=better)
    return inverse


def _weighted_error(x: np.ndarray, weights: np.ndarray, inverse: np.ndarray, codes: np.ndarray) -> np.ndarray:
    difference = x - (F(1) / inverse) * codes
    return total(weights * difference * difference)


def _changed_code(
    i: int, x: np.ndarray, w: np.ndarray, codes: np.ndarray, products: np.ndarray, squares: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Code i of each block becomes the one that fits the scale of all others, where that lowers the error."""
    weight, old = w[i], codes[i]
    rest_products = products - weight * x[i] * old
    rest_squares = squares - weight * old * old
    new = np.minimum(np.rint(x[i] * rest_squares / rest_products), F(limit))
    possible = (rest_products > 0) & (rest_squares > 0) & (new != old)
    new_products = rest_products + weight * x[i] * new
    new_squares = rest_squares + weight * new * new
    better = possible & (new_products * new_products * squares > products * products * new_squares)
    codes[i] = np.where(better, new, old)
    return np.where(better, new_products, products), np.where(better, new_squares, squares)
