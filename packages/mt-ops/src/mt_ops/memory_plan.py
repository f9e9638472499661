"""Memory that `mt plan` expects of each pipeline rank, recorded as a run begins or computed of one that is over.

An event of kind `memory_plan` has `ranks`: pp_ranks, total (bytes at the peak) and bytes by what takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_core.config.loading import load_config_anywhere
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.callbacks import Callback, Run
from mt_ops.reading.mt_run import CONFIG
from mt_ops.reading.run import Run as RecordedRun

MEMORY_PLAN = "memory_plan"
CPU = "cpu"


class MemoryPlan(Callback):
    """Plans the run as it begins, which takes seconds; without mt-tools it says what to install."""

    def on_train_start(self, run: Run) -> None:
        try:
            ranks = planned_memory(run.config, run.ctx.world.size, run.host, device=run.ctx.device.type)
        except MtError as error:
            run.message(f"warning: no memory_plan: {error}")
            return
        run.event(MEMORY_PLAN, ranks=ranks)
        largest = max(rank["total"] for rank in ranks)
        run.message(f"planned memory of the largest rank: {largest / 2**30:.2f} GiB")


def planned_memory(config: Config, world: int, host: PluginHost, device: str) -> list[dict[str, Any]]:
    """One entry for pipeline ranks of equal costs. Raises ConfigError for a model that cannot be planned."""
    from mt_tools.plan.layouts import Planner
    from mt_tools.plan.machines import MACHINES, THIS, get_machine
    from mt_tools.plan.report import rank_values
    from mt_tools.plan.timing import Clock

    machine = get_machine(THIS if device == CPU else next(iter(MACHINES)), world)
    plan = Planner(config, host, machine).plan(config, world)
    values = [rank_values(rank, Clock(machine, plan.sizes)) for rank in plan.ranks]
    return [
        {"pp_ranks": rank["pp_ranks"], "total": rank["bytes"]["total"], "bytes": _flat(rank["bytes"])}
        for rank in values
    ]


def _flat(sizes: dict[str, Any]) -> dict[str, int]:
    """Activations as one number."""
    whole = {name: sum(size.values()) if isinstance(size, dict) else size for name, size in sizes.items()}
    return {name: int(size) for name, size in whole.items() if name != "total" and size}


def add_planned_memory(runs: Sequence[RecordedRun]) -> list[str]:
    """Plan the runs of mt that have not recorded it. Returns why some could not be."""
    host, problems = load_plugins(), []
    for run in runs:
        if run.planned_memory or run.source != "mt" or not (run.path / CONFIG).exists():
            continue
        try:
            ranks = _planned_again(run, host)
            run.events = [*run.events, {"kind": MEMORY_PLAN, "iteration": 0, "time": 0.0, "ranks": ranks}]
        except MtError as error:
            problems.append(f"{run.name}: no planned memory: {error}")
    return problems


def _planned_again(run: RecordedRun, host: PluginHost) -> list[dict[str, Any]]:
    config = load_config_anywhere(run.path / CONFIG, host=host).config
    on_device = any("device_peak_bytes" in entry for entry in run.status)
    world = int(run.environment.get("world_size") or 1)
    return planned_memory(config, world, host, "cuda" if on_device else CPU)


def build_memory_plan(config: Config) -> MemoryPlan:
    return MemoryPlan()
