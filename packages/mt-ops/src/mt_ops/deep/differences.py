"""Tensors of two recordings side by side, with the tolerance that a twin shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_ops.deep.recording import Recording

MARGIN = 8.0
"""Largest ratio of a difference by rounding to that of the twin, whose inputs of each layer are one unit off, where
another kernel rounds after each of its operations."""


@dataclass(frozen=True)
class TensorDifference:
    """relative: norm of the difference over the norm. allowed: MARGIN times that of the twin. growth: relative over
    that of the tensor before."""

    part: str
    name: str
    relative: float
    allowed: float
    cosine: float
    growth: float

    @property
    def differs(self) -> bool:
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        grown = "" if math.isnan(self.growth) else f", {self.growth:.3g} times that of the tensor before"
        return (
            f"{self.part} {self.name}: relative {self.relative:.2e} (rounding allows {self.allowed:.1e}), "
            f"cosine {self.cosine:.6f}{grown}"
        )


def differences(a: Recording, b: Recording, twin: Recording) -> list[TensorDifference]:
    """In the order of computation: outputs forward, then their gradients backward, then those of parameters.

    twin: of a, moved. Tensors that one side does not have, or has in another shape, are left out.
    """
    # The order of the forward pass is the one that both sides share.
    backward = {name: a.backward[name] for name in reversed(a.forward) if name in a.backward}
    parameters = {name: a.parameters[name] for name in reversed(a.parameters)}
    return [
        *compared_tensors("output of", a.forward, b.forward, twin.forward),
        *compared_tensors("gradient at the output of", backward, b.backward, twin.backward),
        *compared_tensors("gradient of", parameters, b.parameters, twin.parameters),
    ]


def compared_tensors(
    part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], twin: Mapping[str, Tensor]
) -> Iterator[TensorDifference]:
    """In the order of a."""
    before = math.nan
    for name in a:
        if name not in b or a[name].shape != b[name].shape:
            continue
        relative = relative_error(b[name], a[name])
        smallest = torch.finfo(a[name].dtype).eps
        allowed = MARGIN * max(relative_error(twin[name], a[name]), smallest)
        growth = relative / before if before > 0 else math.nan
        yield TensorDifference(part, name, relative, allowed, _cosine(a[name], b[name]), growth)
        before = relative


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp64; infinite where one alone is not finite."""
    difference, size = (x.double() - reference.double()).norm(), reference.double().norm()
    if not math.isfinite(float(difference)):
        return math.inf
    return float(difference / size) if float(size) > 0 else (0.0 if float(difference) == 0 else math.inf)


def _cosine(x: Tensor, y: Tensor) -> float:
    a, b = x.double().flatten(), y.double().flatten()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else math.nan


def first_of_each_part(compared: Sequence[TensorDifference]) -> list[TensorDifference]:
    """The first tensor that differs, forward and backward."""
    first: dict[str, TensorDifference] = {}
    for difference in compared:
        if difference.differs:
            first.setdefault(difference.part, difference)
    return list(first.values())
