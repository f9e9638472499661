"""Tensors of two recordings side by side, with the tolerance that twins show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mt_ops.deep.recording import Recording
from mt_ops.deep.tolerance import allowed_error


@dataclass(frozen=True)
class TensorDifference:
    """relative: norm of the difference over the norm. allowed: the largest that rounding explains. growth: relative
    over that of the tensor before."""

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


def differences(a: Recording, b: Recording, twins: Sequence[Recording]) -> list[TensorDifference]:
    """In the order of computation: outputs forward, then their gradients backward, then those of parameters.

    twins: of a. Tensors that one side does not have, or has in another shape, are left out.
    """
    # The order of the forward pass is the one that both sides share.
    backward = {name: a.backward[name] for name in reversed(a.forward) if name in a.backward}
    parameters = {name: a.parameters[name] for name in reversed(a.parameters)}
    parts = [
        Part("output of", a.forward, b.forward, [twin.forward for twin in twins]),
        Part("gradient at the output of", backward, b.backward, [twin.backward for twin in twins]),
        Part("gradient of", parameters, b.parameters, [twin.parameters for twin in twins]),
    ]
    return compared_parts(parts)


@dataclass(frozen=True)
class Part:
    """Tensors of one kind by name, in the order of a."""

    title: str
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    twins: Sequence[Mapping[str, Tensor]]

    @property
    def common(self) -> list[str]:
        return [name for name in self.a if name in self.b and self.a[name].shape == self.b[name].shape]


def compared_parts(parts: Sequence[Part]) -> list[TensorDifference]:
    """One after another. What rounding allows depends on how many tensors there are in all."""
    count = sum(len(part.common) for part in parts)
    return [difference for part in parts for difference in _compared(part, count)]


def _compared(part: Part, count: int) -> Iterator[TensorDifference]:
    before = math.nan
    for name in part.common:
        a, b = part.a[name], part.b[name]
        relative = relative_error(b, a)
        allowed = allowed_error(a, [twin[name] for twin in part.twins if name in twin], count)
        growth = relative / before if before > 0 else math.nan
        yield TensorDifference(part.title, name, relative, allowed, _cosine(a, b), growth)
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
