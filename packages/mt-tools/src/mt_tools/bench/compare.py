"""Compares two reports: which metrics regressed by more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.errors import DataError
from mt_tools.bench.report import Case, Report

LOWER_IS_BETTER = frozenset(
    {"ms", "microseconds", "peak_mb", "peak_gb", "idle_share", "seconds", "step_ms", "time_ratio", "operators"}
    | {"bytes_a_parameter", "bubble", "memory_gib", "import_ratio", "beyond_imports"}
)
HIGHER_IS_BETTER = frozenset({"tflops", "gb_per_s", "tokens_per_second", "mfu", "percent_of_floor", "of_gemm_peak"})


@dataclass(frozen=True)
class Change:
    """ratio: how many times better the second report is; below 1 is a regression."""

    case: str
    metric: str
    before: float
    after: float
    ratio: float

    def is_worse(self, tolerance: float) -> bool:
        return self.ratio < 1.0 - tolerance


def compare(before: Report, after: Report) -> list[Change]:
    """Every metric that both have and that has a better direction, worst first. Raises DataError without any."""
    if before.kind != after.kind:
        raise DataError(f"a report of mt bench {before.kind} cannot be compared with one of mt bench {after.kind}")
    old = {case["name"]: dict(metrics(case)) for case in before.cases}
    changes = [
        Change(case["name"], metric, old[case["name"]][metric], value, _ratio(metric, old[case["name"]][metric], value))
        for case in after.cases
        if case["name"] in old
        for metric, value in metrics(case)
        if metric in old[case["name"]]
    ]
    if not changes:
        raise DataError("the two reports have no case in common")
    return sorted(changes, key=lambda change: change.ratio)


def metrics(case: Case) -> Iterator[tuple[str, float]]:
    """(path, value) of each metric that has a better direction, as ("step.triton.ms", 0.2)."""
    yield from _walk(case, ())


def _walk(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            yield from _walk(value, here)
        elif isinstance(value, int | float) and (_is_lower(here) or here[-1] in HIGHER_IS_BETTER):
            yield ".".join(here), float(value)


def _is_lower(path: tuple[str, ...]) -> bool:
    # Or one level up: peak_mb is a table of implementations.
    return path[-1] in LOWER_IS_BETTER or (len(path) > 1 and path[-2] in LOWER_IS_BETTER)


def _ratio(metric: str, before: float, after: float) -> float:
    if before == after:
        return 1.0
    # The ratio is above 1 for an improvement, whichever direction is better.
    worse, better = (after, before) if _is_lower(tuple(metric.split("."))) else (before, after)
    return better / worse if worse else float("inf")


def missing(before: Report, after: Report) -> list[str]:
    """Cases of the first report that the second one does not have."""
    there = {case["name"] for case in after.cases}
    return [case["name"] for case in before.cases if case["name"] not in there]
