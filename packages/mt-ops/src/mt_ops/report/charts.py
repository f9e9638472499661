"""Which curves the page shows: charts in groups, in the order in which one looks at a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mt_ops.reading.run import Run

BY_LAYER = "moe/layer_"


@dataclass(frozen=True)
class Chart:
    """metric: name of a series. unit: of its values, "" for none."""

    metric: str
    title: str
    group: str
    unit: str = ""


KNOWN = (
    Chart("loss", "Training loss", "Loss"),
    Chart("valid_loss", "Validation loss", "Loss"),
    Chart("learning_rate", "Learning rate", "Optimization"),
    Chart("grad_norm", "Gradient norm", "Optimization"),
    Chart("params_norm", "Norm of the parameters", "Optimization"),
    Chart("loss_scale", "Loss scale", "Optimization"),
    Chart("skipped_iterations", "Skipped steps", "Optimization", "steps"),
    Chart("global_batch_size", "Global batch size", "Optimization", "samples"),
    Chart("zeros_in_grad", "Zeros in the gradient", "Optimization", "elements"),
    Chart("tokens_per_second", "Tokens per second", "Speed", "tokens/s"),
    Chart("samples_per_second", "Samples per second", "Speed", "samples/s"),
    Chart("iteration_time", "Time of a step", "Speed", "s"),
    Chart("tflops", "Model TFLOP/s of a device", "Speed", "TFLOP/s"),
    Chart("mfu", "Model FLOP utilization (MFU)", "Speed"),
    Chart("memory_reserved", "Device memory, reserved", "Memory", "bytes"),
    Chart("memory_allocated", "Device memory, allocated", "Memory", "bytes"),
    Chart("max_memory_allocated", "Device memory, peak", "Memory", "bytes"),
    Chart("memory_gib", "Device memory", "Memory", "GiB"),
    Chart("host_memory_gb", "Host memory of the largest process", "Memory", "GiB"),
)
IGNORED = {"skipped_since_log", "epoch"}
GROUPS = ("Loss", "Optimization", "Speed", "Memory", "Experts", "Time by part", "Other")


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Charts of every metric that a run has and that is not the same number all along, by group."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    known = {chart.metric: chart for chart in KNOWN}
    order = {chart.metric: place for place, chart in enumerate(KNOWN)}
    charts = [known.get(name) or _unknown(name) for name in names if name not in IGNORED]
    shown = [chart for chart in charts if _varies(chart.metric, runs)]
    return sorted(shown, key=lambda chart: (GROUPS.index(chart.group), order.get(chart.metric, len(order))))


def _unknown(name: str) -> Chart:
    if name.startswith(BY_LAYER):
        return Chart(name, name.removeprefix("moe/").replace("_", " "), "Experts")
    if name.startswith("parts/"):
        return Chart(name, name.removeprefix("parts/").replace("_", " "), "Time by part", "s")
    if name.endswith("_loss"):
        return Chart(name, name.replace("_", " ").capitalize(), "Loss")
    return Chart(name, name.replace("_", " "), "Other")


ALWAYS = {"loss", "valid_loss", "learning_rate", "grad_norm"}


def _varies(metric: str, runs: Iterable[Run]) -> bool:
    if metric in ALWAYS:
        return True
    values = {run.series[metric].values.min() for run in runs if metric in run.series}
    values |= {run.series[metric].values.max() for run in runs if metric in run.series}
    return len(values) > 1
