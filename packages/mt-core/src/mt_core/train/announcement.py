"""What a user is told before the first step: what is trained, where, and what `auto` became."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from mt_core.nn.fp8.use import fp8_report
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import AxisName
from mt_core.train.checkpointing import shapes_of_all_stages

if TYPE_CHECKING:
    from mt_core.train.trainer import Trainer

AXES: Mapping[AxisName, str] = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "ep": "expert parallel",
}


def announcement(run: Trainer) -> Iterator[str]:
    """One line after another. Collective over pipeline stages."""
    yield _model(run)
    for choice in run.kernels.choices:
        # On a CPU auto is torch, and nobody asks why.
        if run.device.type == "cuda" or choice.implementation.name != "torch" or not choice.automatic:
            yield f"kernel {choice}"
    fp8 = fp8_report(run.model)
    if fp8 is not None:
        yield str(fp8)
    if run.resumed_from is not None:
        yield f"resumed from {run.resumed_from} (step {run.state.iteration})"
    elif run.config.checkpoint.load is not None:
        yield f"weights from {run.config.checkpoint.load}, new optimizer"
        if run.not_loaded:
            yield f"with their initial values: {', '.join(run.not_loaded)}"


def _model(run: Trainer) -> str:
    shapes = shapes_of_all_stages(parameter_layouts(run.model), run.ctx)
    count = sum(math.prod(shape) for shape in shapes.values())
    threads = f" with {torch.get_num_threads()} threads" if run.device.type == "cpu" else ""
    ranks = "".join(
        f", {what} over {run.ctx.axis(name).size}" for name, what in AXES.items() if run.ctx.axis(name).size > 1
    )
    what = f"{run.config.model.family}: {count:,} parameters in {run.config.precision.dtype}"
    backend = getattr(run.config.model, "attention_backend", "of the model")
    return f"{what} on {run.device}{threads}{ranks}, attention {backend}"
