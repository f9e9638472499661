"""Benchmarks that need no GPU: our step beside a plain loop, operators launched, bytes held, import time."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mt_core._torch_compat import UncompiledDispatchMode
from mt_core.data.loader import collate
from mt_core.plugins import PluginHost
from mt_tools.bench.plain_gpt import PlainLoop, PlainShape
from mt_tools.bench.report import Case
from mt_tools.bench.timing import alternating, ratio
from mt_tools.bench.training import RandomTokens, TimedRun
from mt_tools.bench.training_presets import COMMON, TEN_BYTES

SHAPES = {
    "wide vocabulary": PlainShape(layers=6, hidden=384, heads=6, vocabulary=50304, sequence=256, batch=4),
    "bytes": PlainShape(layers=4, hidden=128, heads=4, vocabulary=261, sequence=128, batch=16),
}
OPTIMIZERS = {
    "fp32": ("precision.dtype=fp32",),
    "bf16, fp32 copies": ("precision.dtype=bf16",),
    "bf16, remainders": (
        "precision.dtype=bf16",
        "optimizer.main_weights=remainders",
        "precision.accumulate_allreduce_grads_in_fp32=false",
    ),
    "bf16, remainders, bf16 moments": ("precision.dtype=bf16", *TEN_BYTES),
}


def cpu_cases(steps: int, host: PluginHost) -> Iterator[Case]:
    for name, shape in SHAPES.items():
        yield step_against_plain_loop(name, shape, steps, host)
    for name, settings in OPTIMIZERS.items():
        yield bytes_of_optimizer(name, settings, host)
    yield import_case()


class Launches(UncompiledDispatchMode):
    """Counts operators other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views launch nothing.
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object]) -> int:
    with Launches() as mode:
        call()
    return mode.count


def step_against_plain_loop(name: str, shape: PlainShape, steps: int, host: PluginHost) -> Case:
    """The median ratio over pairs of steps, which alternate between the two, in fp32."""
    torch.manual_seed(0)
    data, plain = RandomTokens(shape.vocabulary, shape.sequence), PlainLoop(shape)
    run = TimedRun([*shape.settings(), *COMMON, "train.device=cpu"], None, host)
    arrays = collate(data[index] for index in range(shape.batch))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    try:
        # In turns, so that both steps see the same machine.
        times = alternating({"mt": run.step, "plain": lambda: plain.step(batch)}, steps)
        operators, plain_operators = launches(run.step), launches(lambda: plain.step(batch))
    finally:
        run.close()
    return {
        "name": f"step against a plain loop, {name}",
        "parameters": sum(parameter.numel() for parameter in plain.model.parameters()),
        "pairs": steps,
        "tokens_per_second": shape.batch * shape.sequence / statistics.median(times["mt"]),
        "time_ratio": ratio(times, "mt", "plain"),
        "operators": operators,
        "operators_of_plain_loop": plain_operators,
    }


def bytes_of_optimizer(name: str, settings: tuple[str, ...], host: PluginHost) -> Case:
    """Bytes of weights, gradients, master weights and moments after a step."""
    small = PlainShape(layers=1, hidden=32, heads=2, vocabulary=261, sequence=8, batch=1)
    run = TimedRun([*small.settings(), *COMMON, *settings, "train.device=cpu"], None, host)
    try:
        run.step()
    finally:
        run.close()
    trainer = run.trainer
    mains = [parameter for _, parameter in trainer.engine.weights.named_parameters()]
    weights = list(trainer.model.parameters())
    tensors: list[Tensor] = [*weights, *mains]
    tensors += [tensor.grad for tensor in (*weights, *mains) if tensor.grad is not None]
    tensors += [x for main in mains for x in trainer.engine.optimizer.state[main].values() if x.ndim]
    storages = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    count = sum(parameter.numel() for parameter in weights)
    return {"name": f"optimizer, {name}", "bytes_a_parameter": sum(storages.values()) / count}


def import_case(rounds: int = 3) -> Case:
    """Import time of the trainer over that of torch; each import runs in a new process, alternating."""
    modules = ("torch", "mt_core.train.trainer")
    times = alternating({module: partial(_import, module) for module in modules}, rounds, warm_up=0)
    return {"name": "importing the trainer against torch", "import_ratio": ratio(times, modules[1], modules[0])}


def _import(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
