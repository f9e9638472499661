"""Quantities of two runs step by step, in the order in which one follows from another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mt_ops.compare.means import over_the_same_steps
from mt_ops.reading.run import Run, Series

COUNTERS = ("samples", "global_batch_size", "skipped_iterations", "loss_scale", "learning_rate")
"""What is the same in every layout: a difference is none of rounding. `samples` are those consumed."""
COMPUTED = ("loss", "grad_norm", "params_norm", "zeros_in_grad")
LEFT_OUT = (
    *("iteration_time", "tokens_per_second", "samples_per_second", "tflops", "mfu", "skipped_since_log"),
    *("memory_reserved", "memory_allocated", "max_memory_allocated", "host_memory_gb", "memory_gib", "nan_since_log"),
)
"""Speed and memory, which differ between any two runs."""
COUNTER_TOLERANCE = 1e-6
"""Relative. Logs print learning rates with seven digits."""


@dataclass(frozen=True)
class Parting:
    """The first step at which two values are farther apart than allowed. relative: to the larger of both."""

    step: int
    a: float
    b: float
    relative: float


@dataclass(frozen=True)
class Quantity:
    """steps: how many both runs have. first: at which the values are not the same number. parts: at which they are
    farther apart than `tolerance`. largest: relative difference of all. note: how values were made comparable."""

    name: str
    steps: int
    tolerance: float
    first: Parting | None
    parts: Parting | None
    largest: float
    note: str | None = None

    @property
    def is_counter(self) -> bool:
        return self.name in COUNTERS


def quantities(a: Run, b: Run, tolerance: float) -> list[Quantity]:
    """Those that both runs have at common steps: counters, then loss and norms, then all others.

    tolerance: largest relative difference of what is computed.
    """
    compared = []
    for name, first, second in _common(a, b):
        averaged = over_the_same_steps(name, a, b)
        first, second, note = averaged if averaged is not None else (first, second, None)
        if note is not None or len(np.intersect1d(first.steps, second.steps, assume_unique=True)):
            allowed = COUNTER_TOLERANCE if name in COUNTERS else tolerance
            compared.append(replace(_quantity(name, first, second, allowed), note=note))
    return compared


def _common(a: Run, b: Run) -> Iterator[tuple[str, Series, Series]]:
    mine, theirs = (
        {**run.series, **({"samples": run.axes["samples"]} if "samples" in run.axes else {})} for run in (a, b)
    )
    validation = [name for name in mine if name.startswith("valid_") or name.endswith("_loss")]
    order = [*COUNTERS, *COMPUTED, *validation]
    for name in dict.fromkeys([*order, *mine]):
        if name in mine and name in theirs and name not in LEFT_OUT and not name.startswith("parts/"):
            yield name, mine[name], theirs[name]


def _quantity(name: str, a: Series, b: Series, tolerance: float) -> Quantity:
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    x, y = a.values[at_a], b.values[at_b]
    relative = relative_differences(x, y)

    def first_above(limit: float) -> Parting | None:
        places = np.flatnonzero(relative > limit)
        if not len(places):
            return None
        at = places[0]
        return Parting(int(steps[at]), float(x[at]), float(y[at]), float(relative[at]))

    return Quantity(
        name, len(steps), tolerance, first_above(0.0), first_above(tolerance), float(relative.max(initial=0.0))
    )


def relative_differences(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[n]: |x - y| / max(|x|, |y|). 0 where both are NaN or the same number; infinite where one alone is finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    relative[same] = 0.0
    relative[~same & ~(np.isfinite(x) & np.isfinite(y))] = np.inf
    return relative


def first_parting(compared: Sequence[Quantity]) -> Quantity | None:
    """The one that parts at the smallest step; of several the first, from which others follow."""
    apart = [quantity for quantity in compared if quantity.parts is not None]
    return min(apart, key=lambda quantity: quantity.parts.step if quantity.parts else 0, default=None)
