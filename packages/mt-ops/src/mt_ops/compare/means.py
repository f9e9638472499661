"""Means over the steps since the last line of a log, of two runs with other lines, as means over the same steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mt_ops.reading.run import Run, Series, Steps, Values

MEANS = ("loss",)
"""Metrics of a line that are means over the steps since the line before; others are of the step itself."""
OF_ONE_STEP = ("torchtitan",)
"""Sources whose lines have the loss of their step alone."""


class Lines(NamedTuple):
    """The lines of a log. starts: [n] last step before those that a line stands for. ends: [n] its own step. values:
    [n]. weights: [n] steps that have a value: those that were not skipped."""

    starts: Steps
    ends: Steps
    values: Values
    weights: Values

    @property
    def boundaries(self) -> Steps:
        return np.union1d(self.starts, self.ends)

    def mean(self, start: int, end: int) -> float | None:
        """Over the steps after `start` up to `end`; None where lines stand for some of them alone."""
        first, last = np.searchsorted(self.ends, [start, end], side="right")
        chosen = slice(int(first), int(last))
        if int((self.ends[chosen] - self.starts[chosen]).sum()) != end - start:
            return None
        if last - first == 1:
            return float(self.values[first])
        weights = self.weights[chosen]
        used = weights > 0
        return float((self.values[chosen] * weights)[used].sum() / weights.sum()) if used.any() else float("nan")


def over_the_same_steps(name: str, a: Run, b: Run) -> tuple[Series, Series, str] | None:
    """Both runs' values of a metric as means over the same steps, and what was done, for a reader. None for a metric
    that is no mean, and where the lines of both stand for the same steps."""
    if name not in MEANS:
        return None
    mine, theirs = _lines(a, name), _lines(b, name)
    common, at_a, at_b = np.intersect1d(mine.ends, theirs.ends, assume_unique=True, return_indices=True)
    if not len(common) or np.array_equal(mine.starts[at_a], theirs.starts[at_b]):
        return None
    bounds = np.intersect1d(mine.boundaries, theirs.boundaries)
    rows = []
    for end in common:
        place = int(np.searchsorted(bounds, end)) - 1
        if place >= 0:
            start = int(bounds[place])
            rows.append((end, mine.mean(start, int(end)), theirs.mean(start, int(end))))
    kept = [row for row in rows if row[1] is not None and row[2] is not None]
    steps = np.array([row[0] for row in kept], dtype=np.int64)
    first, second = (Series(steps, np.array([row[place] for row in kept], dtype=np.float64)) for place in (1, 2))
    return first, second, _told(mine, theirs, len(kept), len(common) - len(kept))


def _told(mine: Lines, theirs: Lines, compared: int, left_out: int) -> str:
    most = [int((lines.ends - lines.starts).max()) for lines in (mine, theirs)]
    rest = f"; {left_out} steps, at which no mean of both is over the same steps, are left out" if left_out else ""
    lines = f"lines are means over up to {most[0]} steps in A and {most[1]} in B"
    return f"{lines}; compared are means over the same steps{rest}"


def _lines(run: Run, name: str) -> Lines:
    series = run.series[name]
    starts = _starts(run, series.steps)
    skipped = run.series.get("skipped_since_log")
    weights = (series.steps - starts).astype(np.float64)
    if skipped is not None and np.array_equal(skipped.steps, series.steps):
        weights -= np.nan_to_num(skipped.values)
    return Lines(starts, series.steps, series.values, weights)


def _starts(run: Run, ends: Steps) -> Steps:
    """The line before, or the step at which a process began if that is later."""
    if run.source in OF_ONE_STEP:
        return ends - 1
    # The first line of a part of a log stands for as many steps as the second one; that of a whole one for fewer.
    first = 0 if len(ends) < 2 else max(0, int(2 * ends[0] - ends[1]))
    starts = np.concatenate([[first], ends[:-1]]).astype(np.int64)
    for begun in run.resumes:
        starts[(starts < begun) & (begun < ends)] = begun
    return starts
