"""Lines printed before the first step: what is trained, where, and how `auto` values were resolved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch

from mt_core.config.schema import Config
from mt_core.data.training_length import iterations_per_epoch
from mt_core.errors import ConfigError
from mt_core.nn.fp8.use import fp8_report
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import AxisName
from mt_core.run_events import TimeAccount
from mt_core.train.callbacks import Run
from mt_core.train.checkpoint.state import shapes_of_all_stages
from mt_core.train.reporting.step_metrics import peak_tflops, unknown_peak
from mt_core.wording import counted

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
        if peak_tflops(run.engine.device, run.config.logging) is None:
            yield f"no MFU: {unknown_peak(torch.cuda.get_device_name(run.engine.device))}"
    if run.config.train.deterministic and run.engine.device.type == "cuda" and run.engine.ctx.world.size > 1:
        yield sums_of_nccl(os.environ)
    fp8 = fp8_report(run.model)
    if fp8 is not None:
        yield str(fp8)
    if run.resumed_from is not None:
        yield f"resumed from {run.resumed_from} (step {run.state.iteration})"
    elif (start := run.config.checkpoint.start) is not None:
        sources = start if isinstance(start, str) else ", ".join(f"{path} ({part})" for part, path in start.items())
        yield f"weights from {sources}, new optimizer"
        if run.loaded_weights is not None and run.loaded_weights.initialized:
            yield f"with their initial values: {', '.join(run.loaded_weights.initialized)}"
        if run.loaded_weights is not None and run.loaded_weights.left_out:
            yield f"not taken from the checkpoint: {', '.join(run.loaded_weights.left_out)}"
    epochs, steps = run.config.train.train_epochs, iterations_per_epoch(run.config)
    if epochs is not None and steps is not None:
        samples = counted(run.engine.batch_size.full, "sample")
        yield f"{counted(epochs, 'epoch')} of {counted(steps, 'step')} of {samples}"


def sums_of_nccl(environment: Mapping[str, str]) -> str:
    """How NCCL orders sums over ranks in a deterministic run. Raises ConfigError for an algorithm whose order is not
    fixed, those that switches compute (NVLS)."""
    names = environment.get("NCCL_ALGO", "")
    # A ^ names what is not to be used; several are separated by commas, with `allreduce:` and the like before them.
    excluded, chosen = names.startswith("^"), names.lstrip("^").lower()
    allowed = "nvls" in chosen if excluded else bool(chosen) and "nvls" not in chosen
    if allowed:
        return f"NCCL_ALGO={names}: sums over ranks have one order"
    if not names:
        return (
            "NCCL_ALGO is not set, and NCCL may choose another order of sums in another run; NCCL_ALGO=Ring fixes one"
        )
    raise ConfigError(
        f"train.deterministic=true with NCCL_ALGO={names}: switches sum in any order; it can be Ring, Tree, "
        "CollnetDirect, CollnetChain or ^NVLS"
    )


def time_lines(account: TimeAccount, failures_per_node_day: float, ranks: int) -> Iterator[str]:
    """The last lines of the log: where the time of the run went, and what a failure would cost."""
    yield from account.lines()
    # Ranks of a node: those that this machine started.
    nodes = max(ranks // max(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), 1), 1)
    interval = account.save_interval(failures_per_node_day * nodes)
    # A run that is shorter than the interval has nothing to choose.
    if interval is not None and account.total > interval:
        yield (
            f"with {failures_per_node_day:g} failures of a node a day ({nodes} {'node' if nodes == 1 else 'nodes'}; "
            f"logging.failures_per_node_day) checkpoints each {timedelta(seconds=round(interval))} lose least; a "
            f"failure then costs {timedelta(seconds=round(account.failure_cost(interval)))}"
        )


def _model(run: Run) -> str:
    count = _number_of_elements(run, run.engine.layouts)
    trained = _number_of_elements(run, {name: layout for name, layout in run.engine.layouts.items() if layout.trained})
    frozen = "" if trained == count else f" ({trained:,} of them trained)"
    threads = f" with {torch.get_num_threads()} threads" if run.engine.device.type == "cpu" else ""
    ranks = "".join(
        f", {what} over {run.ctx.axis(name).size}" for name, what in AXES.items() if run.ctx.axis(name).size > 1
    )
    what = f"{run.config.model.family}: {count:,} parameters{frozen} in {run.config.precision.dtype}"
    backends = ", ".join(sorted(run.engine.kernels.attention_backends))
    attention = f", attention {backends}" if backends else ""
    loss = f"loss {run.config.train.loss}"
    return f"{what} on {run.engine.device}{threads}{ranks}{attention}, {loss}{_main_weights(run.config)}"


def _main_weights(config: Config) -> str:
    """What is kept beside bf16 weights, where the optimizer has a choice. FSDP2 shards fp32 weights."""
    form = getattr(config.optimizer, "main_weights", None)
    in_bf16 = config.precision.dtype == "bf16" and not config.parallel.use_torch_fsdp2
    return f", master weights {form}" if form is not None and in_bf16 else ""


def _number_of_elements(run: Run, layouts: Mapping[str, ParameterLayout]) -> int:
    """Over all stages."""
    return sum(math.prod(shape) for shape in shapes_of_all_stages(layouts, run.ctx).values())
