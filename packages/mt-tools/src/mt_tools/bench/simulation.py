"""Layouts and pipeline schedules of models that are too large for the machine: counted and simulated, not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.parallel.pipeline.timeline import StageTimes, simulate
from mt_core.plugins import PluginHost
from mt_core.specs import PIPELINE_SCHEDULES
from mt_tools.bench.report import Case
from mt_tools.plan.layouts import Planner
from mt_tools.plan.machines import get_machine


@dataclass(frozen=True)
class SimulatedRun:
    name: str
    preset: str
    world: int
    settings: tuple[str, ...]


def _layout(tensor: int, pipeline: int, batch: int, *others: str) -> tuple[str, ...]:
    return (
        f"parallel.tensor_model_parallel_size={tensor}",
        f"parallel.pipeline_model_parallel_size={pipeline}",
        f"parallel.sequence_parallel={'true' if tensor > 1 else 'false'}",
        "parallel.use_distributed_optimizer=true",
        "train.micro_batch_size=1",
        f"train.global_batch_size={batch}",
        "train.train_iters=100",
        "precision.dtype=bf16",
        *others,
    )


RUNS = (
    SimulatedRun("llama3-70b on 64", "llama3-70b", 64, _layout(8, 4, 128)),
    SimulatedRun(
        "llama3.1-405b on 1024",
        "llama3.1-405b",
        1024,
        # Without recomputation a rank would need 130 GiB. So 5 of each stage's 8 layers are recomputed.
        _layout(8, 16, 256, "recompute.recompute_granularity=full", "recompute.recompute_num_layers=5"),
    ),
    SimulatedRun(
        "deepseek-v3 on 2048",
        "deepseek-v3",
        2048,
        _layout(
            1,
            16,
            15360,
            "parallel.expert_model_parallel_size=64",
            "parallel.expert_tensor_parallel_size=1",
            "recompute.recompute_granularity=full",
        ),
    ),
)
PIPELINES = (("70b", 4, 32), ("405b", 16, 64), ("deepseek-v3", 16, 128))
"""Name, ranks of the pipeline, micro-batches."""


def plan_cases(host: PluginHost) -> Iterator[Case]:
    """Memory of the fullest rank, whether it fits beside the memory of libraries, and the estimated step time."""
    machine = get_machine("h100")
    for run in RUNS:
        with as_world(run.world):
            config = load_config(preset=run.preset, overrides=list(run.settings), host=host).config
            plan = Planner(config, host, machine).plan(config, run.world)
        yield {
            "name": run.name,
            "settings": list(run.settings),
            "memory_gib": plan.memory_gib,
            "fits": plan.memory_gib <= machine.usable_gib,
            "seconds": plan.seconds,
            "bubble": plan.bubble,
            "mfu": plan.utilization(machine),
            "estimated_for": machine.name,
        }


def schedule_cases(host: PluginHost) -> Iterator[Case]:
    """Pipeline bubbles of every schedule, with a backward pass of twice the forward's time."""
    for name, ranks, micro_batches in PIPELINES:
        for schedule in (spec.schedule.load() for spec in host[PIPELINE_SCHEDULES]):
            each = schedule.min_stages_per_rank
            stages = ranks * each
            # A rank's work is the same for all schedules, however many stages it is divided into.
            times = StageTimes.even(stages, 1.0 / each, 2.0 / each)
            bubble = simulate(schedule, ranks, micro_batches, times).bubble_ratio
            yield {"name": f"{name}: {schedule.name}, {ranks} ranks, {micro_batches} micro-batches", "bubble": bubble}
