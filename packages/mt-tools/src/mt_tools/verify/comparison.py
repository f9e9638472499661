"""Differences between two runs, in the order in which the model uses its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat, zip_longest

from torch import Tensor

from mt_tools.verify.run_record import RunRecord


@dataclass(frozen=True)
class Tolerances:
    """Tolerances: largest relative differences, by default those of fp32. floor: a tensor of a smaller part of the norm
    of all tensors of its kind counts as that large, such as a gradient that is 0 but for rounding; with the defaults it
    may be off by 1e-8 of that norm, a sixth of fp32's epsilon. least_loss: the same of the loss of a step."""

    loss: float = 1e-5
    gradient: float = 1e-5
    norm: float = 2e-6
    weights: float = 1e-5
    rate: float = 1e-9
    floor: float = 1e-3
    least_loss: float = 0.0


SIXTEEN_BITS = Tolerances(loss=1e-4, gradient=0.03, norm=3e-3, weights=0.01, floor=0.01)
"""For bf16, whose numbers have 8 bits. Measured with tensor parallelism: at most 9e-6, 6e-3, 2e-4 and 3e-3."""


@dataclass(frozen=True)
class Difference:
    """off: relative difference; None for a tensor that only one side has."""

    kind: str
    name: str
    off: float | None
    allowed: float

    @property
    def size(self) -> float:
        """`off`, and infinite where it is NaN or one side has no tensor."""
        return math.inf if self.off is None or math.isnan(self.off) else self.off

    @property
    def too_large(self) -> bool:
        return self.size > self.allowed

    def __str__(self) -> str:
        size = "missing on one side" if self.off is None else f"{self.off:.1e} (allowed {self.allowed:.0e})"
        return f"{self.kind} {self.name}: {size}"


def compare(record: RunRecord, reference: RunRecord, tolerances: Tolerances | None = None) -> list[Difference]:
    """Every quantity of both runs: losses step by step, then evaluations, auxiliary losses, gradients of the first
    step, and weights after the last."""
    allowed = tolerances or Tolerances()
    # Later gradient norms depend on weights that already differ by rounding.
    norms = [allowed.norm, *[max(allowed.loss, allowed.norm)] * len(reference.norms)]
    steps = [
        _numbers("loss", record.losses, reference.losses, repeat(allowed.loss), least=allowed.least_loss),
        _numbers("gradient norm", record.norms, reference.norms, norms),
        _numbers("learning rate", record.rates, reference.rates, repeat(allowed.rate)),
        _numbers("consumed samples", record.samples, reference.samples, repeat(0.0)),
    ]
    return [
        # By step, not by kind: the first line that is off names the first step that is off.
        *(difference for of_step in zip_longest(*steps) for difference in of_step if difference is not None),
        *_numbers("evaluation", record.evaluations, reference.evaluations, repeat(allowed.loss), "number"),
        *_auxiliary(record.auxiliary, reference.auxiliary, allowed.loss),
        *_tensors("gradient", record.gradients, reference.gradients, allowed.gradient, allowed.floor),
        *_tensors("weights", record.weights, reference.weights, allowed.weights, allowed.floor),
    ]


def _numbers(
    kind: str,
    values: Sequence[float],
    reference: Sequence[float],
    allowed: Iterable[float],
    counted: str = "of step",
    least: float = 0.0,
) -> list[Difference]:
    # As many steps on both sides, or the runs are not comparable.
    pairs = zip(values, reference, strict=True)
    return [
        Difference(kind, f"{counted} {number}", _ratio(mine, theirs, least), limit)
        for number, ((mine, theirs), limit) in enumerate(zip(pairs, allowed, strict=False), start=1)
    ]


def _auxiliary(
    losses: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]], allowed: float
) -> Iterator[Difference]:
    for number, (mine, theirs) in enumerate(zip(losses, reference, strict=True), start=1):
        for name in dict.fromkeys([*theirs, *mine]):
            off = _ratio(mine[name], theirs[name]) if name in mine and name in theirs else None
            yield Difference("auxiliary loss", f"{name} of step {number}", off, allowed)


def _tensors(
    kind: str, tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], allowed: float, floor: float
) -> Iterator[Difference]:
    least = max(1e-12, floor * math.hypot(*(float(tensor.float().norm()) for tensor in reference.values())))
    for name in [*reference, *(name for name in tensors if name not in reference)]:
        if name in tensors and name in reference:
            # Relative to the whole tensor: single elements near 0 may differ by their own size.
            off = (tensors[name].float() - reference[name].float()).norm() / reference[name].float().norm().clamp(least)
            yield Difference(kind, name, float(off), allowed)
        else:
            yield Difference(kind, name, None, allowed)


def _ratio(mine: float, theirs: float, least: float = 0.0) -> float:
    return abs(mine - theirs) / max(abs(theirs), least, 1e-12)
