"""Lines printed before the first step: what is trained, where, and how `auto` values were resolved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from mt_core.nn.fp8.use import fp8_report
from mt_core.parallel.context import AxisName
from mt_core.train.callbacks import Run
from mt_core.train.checkpoint.state import shapes_of_all_stages

AXES: Mapping[AxisName, str] = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "ep": "expert parallel",
}


def run_summary(run: Run) -> Iterator[str]:
    """One line after another. Collective over pipeline stages."""
    yield _model(run)
    if run.engine.malloc is not None:
        yield run.engine.malloc
    for choice in run.engine.kernels.choices:
        # On a CPU `auto` is always torch: not worth a line.
        if run.engine.device.type == "cuda" or choice.implementation.name != "torch" or not choice.automatic:
            yield f"kernel {choice}"
    if run.engine.device.type == "cuda":
        yield from run.engine.kernels.notes
    fp8 = fp8_report(run.model)
    if fp8 is not None:
        yield str(fp8)
    if run.resumed_from is not None:
        yield f"resumed from {run.resumed_from} (step {run.state.iteration})"
    elif run.config.checkpoint.load is not None:
        yield f"weights from {run.config.checkpoint.load}, new optimizer"
        if run.not_loaded:
            yield f"with their initial values: {', '.join(run.not_loaded)}"


def _model(run: Run) -> str:
    shapes = shapes_of_all_stages(run.engine.layouts, run.ctx)
    count = sum(math.prod(shape) for shape in shapes.values())
    threads = f" with {torch.get_num_threads()} threads" if run.engine.device.type == "cpu" else ""
    ranks = "".join(
        f", {what} over {run.ctx.axis(name).size}" for name, what in AXES.items() if run.ctx.axis(name).size > 1
    )
    what = f"{run.config.model.family}: {count:,} parameters in {run.config.precision.dtype}"
    backend = getattr(run.config.model, "attention_backend", "of the model")
    return f"{what} on {run.engine.device}{threads}{ranks}, attention {backend}, loss {run.config.train.loss}"
