"""What the page draws curves from: a table of contents in JSON, and the numbers as a blob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mt_ops.reading.run import Run, Series
from mt_ops.report.blob import Blob, thinned
from mt_ops.report.charts import BY_LAYER, Chart, charts_of

MOST_POINTS = 3_000_000
"""Values of all curves together. A page of 3 million has about 12 MB."""
FEWEST_OF_SERIES = 500
AXES: Mapping[str, str] = {
    "samples": "consumed samples",
    "tokens": "consumed tokens",
    "time": "seconds of training",
}


def page_data(runs: Sequence[Run], most_points: int = MOST_POINTS) -> dict[str, Any]:
    """JSON values: charts, runs with references into `blob`."""
    charts = [chart for chart in charts_of(runs) if not _only_on_a_map(chart)]
    blob, most = Blob(), _points_of_a_series(runs, charts, most_points)
    return {
        "charts": [asdict(chart) for chart in charts],
        "axes": {name: label for name, label in AXES.items() if any(name in run.axes for run in runs)},
        "runs": [_run(run, charts, blob, most) for run in runs],
        "blob": blob.text(),
    }


def _only_on_a_map(chart: Chart) -> bool:
    """Metrics of single layers are shown as a heat map."""
    return chart.metric.startswith(BY_LAYER)


def _points_of_a_series(runs: Sequence[Run], charts: Sequence[Chart], most: int) -> int:
    """The largest number of points of a series with which all of them have at most `most`."""
    names = {chart.metric for chart in charts}
    lengths = sorted(len(series) for run in runs for name, series in run.series.items() if name in names)
    left = most
    for place, length in enumerate(lengths):
        equal = left // (len(lengths) - place)
        if length > equal:
            return max(equal, FEWEST_OF_SERIES)
        left -= length
    return max(lengths, default=0)


def _run(run: Run, charts: Sequence[Chart], blob: Blob, most: int) -> dict[str, Any]:
    series = {chart.metric: run.series[chart.metric] for chart in charts if chart.metric in run.series}
    return {
        "name": run.name,
        "source": run.source,
        "series": {name: _series(values, blob, most) for name, values in series.items()},
        "axes": {name: _series(run.axes[name], blob, most) for name in AXES if name in run.axes},
        "resumes": run.resumes,
        "reduced": any(len(values) > most for values in series.values()),
    }


def _series(series: Series, blob: Blob, most: int) -> dict[str, Any]:
    kept = thinned(series, most)
    return {"steps": blob.steps(kept.steps), "values": blob.floats(kept.values)}
