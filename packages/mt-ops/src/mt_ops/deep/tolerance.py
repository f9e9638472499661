"""How far from a computation another correct one may be, from the distances of its twins.

The difference of a tensor between two correct computations is a random vector e, and those of the twins are drawn as it
is. With d independent directions, |e|^2 over the mean of |e_k|^2 of K twins has Fisher's F distribution with d and K d
degrees of freedom. What it exceeds with a probability of SIGNIFICANCE over the number of compared tensors is allowed,
so that in one of a thousand comparisons of correct computations a tensor is named.

d follows from the twins too: the squared cosine of two independent vectors is 1 / d in the mean. A loss has d = 1 and
needs a wide limit, 10 times the twins' root mean square; a large tensor has many, and 1.5 times is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist

import torch
from torch import Tensor

TWINS = 8
"""With fewer the limit of a single number is much wider: 27 times with 6."""
SIGNIFICANCE = 1e-3


def allowed_error(reference: Tensor, twins: Sequence[Tensor], compared: int) -> float:
    """Largest norm of a difference by rounding over the norm of the reference. compared: number of tensors."""
    smallest = torch.finfo(reference.dtype).eps
    size = float(reference.double().norm())
    errors = [(twin.double() - reference.double()).flatten() for twin in twins]
    norms = [float(error.norm()) for error in errors]
    mean_square = sum(norm**2 for norm in norms) / max(len(norms), 1)
    if size == 0 or mean_square == 0:
        return smallest
    if not math.isfinite(mean_square):
        return math.inf
    directions = effective_dimension(errors, norms)
    limit = f_quantile(directions, directions * len(errors), 1.0 - SIGNIFICANCE / max(compared, 1))
    return max(math.sqrt(mean_square * limit) / size, smallest)


def effective_dimension(errors: Sequence[Tensor], norms: Sequence[float]) -> float:
    """Dimension of the space in which the errors lie, at least 1: 1 over the mean squared cosine of two of them."""
    pairs = [(i, j) for i, j in combinations(range(len(errors)), 2) if norms[i] > 0 and norms[j] > 0]
    squares = [(float(errors[i] @ errors[j]) / (norms[i] * norms[j])) ** 2 for i, j in pairs]
    mean = sum(squares) / len(squares) if squares else 1.0
    return min(max(1.0 / mean if mean > 0 else math.inf, 1.0), float(errors[0].numel()))


def f_quantile(numerator: float, denominator: float, probability: float) -> float:
    """Quantile of the F distribution, by Paulson's approximation (1942): its cube root is nearly normal. Infinite where
    there are too few degrees of freedom for that probability."""
    z, a, b = NormalDist().inv_cdf(probability), 2.0 / (9.0 * numerator), 2.0 / (9.0 * denominator)
    below = (1.0 - b) ** 2 - b * z**2
    if below <= 0:
        return math.inf
    root = math.sqrt(max((1.0 - b) ** 2 * a + (1.0 - a) ** 2 * b - a * b * z**2, 0.0))
    return (((1.0 - a) * (1.0 - b) + z * root) / below) ** 3
