"""The points of a picture: a metric of several runs over an axis, smoothed if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mt_core.errors import DataError, did_you_mean
from mt_ops.reading.run import Run, Series
from mt_ops.report.blob import thinned
from mt_ops.report.charts import KNOWN
from mt_ops.report.page_data import AXES

MOST_POINTS = 4000
"""Points of a curve; of longer ones extremes are kept."""


@dataclass(frozen=True)
class Curve:
    """x, y: [n]"""

    name: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Picture:
    """Curves with the labels of their axes."""

    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False


def picture(
    runs: Sequence[Run], metric: str, axis: str, window: int, *, log_x: bool = False, log_y: bool = False
) -> Picture:
    """axis: step, samples, tokens or time. window: points of the mean that smooths, 1 for none.

    Raises DataError for a metric or axis that no run has.
    """
    curves = [curve for run in runs if (curve := _curve(run, metric, axis, window)) is not None]
    if not curves:
        names = sorted({name for run in runs for name in run.series if not name.startswith("parts/")})
        raise DataError(
            f"no run has {metric} over {axis}{did_you_mean(metric, names)}; --metric can be {', '.join(names)}, "
            f"--over {', '.join(['step', *sorted({name for run in runs for name in run.axes} & set(AXES))])}"
        )
    label = next((chart.title for chart in KNOWN if chart.metric == metric), metric.replace("_", " "))
    shown = [_positive(curve, log_x, log_y) for curve in curves]
    return Picture(AXES.get(axis, axis), label, shown, log_x, log_y)


def _curve(run: Run, metric: str, axis: str, window: int) -> Curve | None:
    series = run.series.get(metric)
    if series is None or not len(series) or (axis != "step" and axis not in run.axes):
        return None
    smooth = type(series)(series.steps, running_mean(series.values, window))
    kept = thinned(smooth, MOST_POINTS)
    x = kept.steps.astype(np.float64)
    if axis != "step":
        of = run.axes[axis]
        x = np.interp(x, of.steps, of.values)
    return Curve(run.name, x, kept.values)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` finite values, of fewer at the beginning."""
    if window <= 1:
        return values
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def _positive(curve: Curve, log_x: bool, log_y: bool) -> Curve:
    """Without points that a logarithmic axis does not have."""
    kept = np.isfinite(curve.y)
    kept &= (curve.x > 0) | (not log_x)
    kept &= (curve.y > 0) | (not log_y)
    return Curve(curve.name, curve.x[kept], curve.y[kept])


def extremes(curve: Curve, most: int) -> Curve:
    """At most about `most` points of it, with the smallest and the largest of each range."""
    kept = thinned(Series(np.arange(len(curve.x)), curve.y), most).steps
    return Curve(curve.name, curve.x[kept], curve.y[kept])
