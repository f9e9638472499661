"""Where two runs differ, in the order in which the model uses its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from mt_core.verify.record import RunRecord


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences in fp32."""

    loss: float = 1e-5
    gradient: float = 1e-5
    norm: float = 1e-6
    weights: float = 1e-5


@dataclass(frozen=True)
class Difference:
    """off: relative; None for a tensor that one side lacks."""

    kind: str
    name: str
    off: float | None
    allowed: float

    @property
    def too_large(self) -> bool:
        return self.off is None or not self.off <= self.allowed

    def __str__(self) -> str:
        size = "missing on one side" if self.off is None else f"{self.off:.1e} (allowed {self.allowed:.0e})"
        return f"{self.kind} {self.name}: {size}"


def compare(found: RunRecord, reference: RunRecord, tolerances: Tolerances | None = None) -> list[Difference]:
    """Every quantity of both runs: losses, norms, gradients of the first step, weights after the last."""
    allowed = tolerances or Tolerances()
    differences = [
        Difference("loss", f"of step {step}", _ratio(mine, theirs), allowed.loss)
        for step, (mine, theirs) in enumerate(zip(found.losses, reference.losses, strict=True), start=1)
    ]
    # Later norms stand on weights that differ by rounding already.
    differences += [
        Difference(
            "gradient norm", f"of step {step}", _ratio(mine, theirs), allowed.norm if step == 1 else allowed.loss
        )
        for step, (mine, theirs) in enumerate(zip(found.norms, reference.norms, strict=True), start=1)
    ]
    differences += _tensors("gradient", found.gradients, reference.gradients, allowed.gradient)
    differences += _tensors("weights", found.weights, reference.weights, allowed.weights)
    return differences


def _tensors(
    kind: str, found: Mapping[str, Tensor], reference: Mapping[str, Tensor], allowed: float
) -> Iterator[Difference]:
    for name in [*reference, *(name for name in found if name not in reference)]:
        if name in found and name in reference:
            off = (found[name].float() - reference[name].float()).norm() / reference[name].float().norm().clamp(1e-12)
            yield Difference(kind, name, float(off), allowed)
        else:
            yield Difference(kind, name, None, allowed)


def _ratio(mine: float, theirs: float) -> float:
    return abs(mine - theirs) / max(abs(theirs), 1e-12)
