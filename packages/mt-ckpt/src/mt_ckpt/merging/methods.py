"""Formulas that merge the tensors of several models, as mergekit has them, in fp32.

Each takes `read(i)`, the tensors of model i that belong together (query, key and value, say), and merges each of them
by itself. Models are read one after the other, TIES twice, so that memory does not grow with their number.

    linear          sum of w_i x_i, over the sum of w_i if normalized
    slerp           on flattened tensors: sin((1 - t) a) / sin a x_0 + sin(t a) / sin a x_1, a the angle between them
    task arithmetic base + lambda sum of w_i d_i with d_i = x_i - base
    TIES            the largest d_i alone, those of the sign of their weighted sum, over the weights that agree
    DARE            d_i of random elements, as large together as all of them, then task arithmetic or TIES
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pieces = list[Tensor]
Read = Callable[[int], Pieces]
Rescale = Literal["none", "l1", "density"]
ANGLE_LIMIT = 0.9995
"""Tensors whose cosine is beyond it are interpolated along a line."""
TINY_NORM, TINY_L1, TINY_WEIGHT = 1e-8, 1e-7, 1e-8


def linear(read: Read, weights: Sequence[Sequence[float]], normalize: bool) -> Pieces:
    """weights: of each model and piece."""
    totals = [x * w for x, w in zip(read(0), weights[0], strict=True)]
    for number in range(1, len(weights)):
        for total, x, weight in zip(totals, read(number), weights[number], strict=True):
            total.add_(x, alpha=weight)
    if not normalize:
        return totals
    return [total / sum(row[piece] for row in weights) for piece, total in enumerate(totals)]


def slerp(read: Read, t: Sequence[float]) -> Pieces:
    """Between model 0 (t = 0) and model 1 (t = 1). t: of each piece."""
    return [_slerp(a, b, fraction) for a, b, fraction in zip(read(0), read(1), t, strict=True)]


def _slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    norms = [norm if norm > TINY_NORM else norm.new_ones(()) for norm in (a.norm(), b.norm())]
    cosine = ((a / norms[0]) * (b / norms[1])).sum().clamp(-1, 1)
    if cosine.abs() > ANGLE_LIMIT:
        return (1 - t) * a + t * b
    angle = torch.acos(cosine)
    sine = torch.sin(angle)
    return torch.sin((1 - t) * angle) / sine * a + torch.sin(t * angle) / sine * b


def passthrough(read: Read, scales: Sequence[float | None]) -> Pieces:
    return [x if scale is None else x * scale for x, scale in zip(read(0), scales, strict=True)]


# -- differences from a base -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparsity:
    """Which elements of a difference stay: the largest, or random ones (DARE).

    rescale: "l1" makes the rest as large as the whole by the sum of magnitudes, as mergekit does; "density" divides it
    by the density, as the paper does. seed: of the random choice, with the tensor's name and the model's number.
    """

    random: bool = False
    rescale: Rescale = "none"
    seed: int = 0

    def of(self, difference: Tensor, density: float, name: str, model: int) -> Tensor:
        if density >= 1:
            return difference
        if density <= 0 or difference.numel() == 0:
            return torch.zeros_like(difference)
        kept = difference * (
            self._drawn(difference, density, name, model) if self.random else _largest(difference, density)
        )
        if self.rescale == "density":
            return kept / density
        before, after = difference.abs().sum(), kept.abs().sum()
        if self.rescale == "none" or before < TINY_L1 or after < TINY_L1:
            return kept
        return kept * (before / after)

    def _drawn(self, difference: Tensor, density: float, name: str, model: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed} {model} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.bernoulli(torch.full_like(difference, density), generator=generator)


def _largest(difference: Tensor, density: float) -> Tensor:
    """1 for the `density` largest elements by magnitude, at least one; else 0."""
    count = max(1, int(density * difference.numel()))
    mask = torch.zeros(difference.numel(), dtype=difference.dtype)
    mask[torch.argsort(difference.abs().flatten(), descending=True)[:count]] = 1
    return mask.view_as(difference)


@dataclass(frozen=True)
class Differences:
    """The weighted differences of models from a base: read(0) is the base, the others follow.

    weights, densities: of each model but the base, and piece. names: of the pieces.
    """

    read: Read
    names: Sequence[str]
    weights: Sequence[Sequence[float]]
    densities: Sequence[Sequence[float]]
    sparsity: Sparsity | None = None

    def of(self, model: int, base: Pieces) -> Pieces:
        """w_i d_i of the model of this number, from 0."""
        return [
            self._sparse(x - whole, model, piece) * self.weights[model][piece]
            for piece, (x, whole) in enumerate(zip(self.read(model + 1), base, strict=True))
        ]

    def _sparse(self, difference: Tensor, model: int, piece: int) -> Tensor:
        if self.sparsity is None:
            return difference
        return self.sparsity.of(difference, self.densities[model][piece], self.names[piece], model)


def task_arithmetic(differences: Differences, scale: float, normalize: bool) -> Pieces:
    """base + scale * sum of w_i d_i (over the sum of w_i)."""
    base = differences.read(0)
    totals = _sums(differences.of(model, base) for model in range(len(differences.weights)))
    if normalize:
        sums = [sum(row[piece] for row in differences.weights) for piece in range(len(base))]
        totals = [x / (w if abs(w) >= TINY_WEIGHT else 1.0) for x, w in zip(totals, sums, strict=True)]
    return [x + scale * total for x, total in zip(base, totals, strict=True)]


def ties(differences: Differences, scale: float, normalize: bool) -> Pieces:
    """The same as task_arithmetic for the elements of each difference that have the sign of the weighted sum of all."""
    base = differences.read(0)
    models = range(len(differences.weights))
    majority = [x >= 0 for x in _sums(differences.of(model, base) for model in models)]
    totals = [torch.zeros_like(x) for x in base]
    divisors = [torch.zeros_like(x) for x in base]
    for model in models:
        for piece, difference in enumerate(differences.of(model, base)):
            agrees = torch.where(majority[piece], difference > 0, difference < 0)
            totals[piece] += difference * agrees
            divisors[piece] += differences.weights[model][piece] * agrees
    if normalize:
        totals = [x / torch.where(w == 0, 1.0, w) for x, w in zip(totals, divisors, strict=True)]
    return [x + scale * total for x, total in zip(base, totals, strict=True)]


def _sums(parts: Iterable[Pieces]) -> Pieces:
    totals: Pieces = []
    for pieces in parts:
        if totals:
            for total, piece in zip(totals, pieces, strict=True):
                total += piece
        else:
            totals = pieces
    return totals


def as_float(value: object, what: str) -> float:
    """A finite number. Raises ValueError, naming `what`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{what} is {value!r}; a number is needed")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{what} is {value!r}; a number is needed") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {value!r}; a finite number is needed")
    return number
