"""Bubbles of pipeline schedules: measured on ranks whose stages sleep, against the simulator's.

A rank works 2 units forward, 2 for gradients of inputs and 2 for those of weights on each micro-batch, partitioned over
its stages, so that all schedules do the same work. Sleeping takes no processor: ranks do not disturb one another, and
what is measured is the schedule and the runtime. Of several steps the quickest counts; the first, which exchanges
shapes, does not.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.parallel.pipeline.pipeline import Pipeline
from mt_core.parallel.pipeline.schedules import PipelineSchedule
from mt_core.parallel.pipeline.stage import Stage
from mt_core.parallel.pipeline.timeline import StageTimes, Timeline, simulate
from mt_core.parallel.pipeline.trace import ScheduleRecorder, write_trace
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import PIPELINE_SCHEDULES
from mt_core.testing import run_ranks
from mt_tools.bench.report import Case

STEPS = 5


class SleepBackward(torch.autograd.Function):
    """Identity whose backward takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingModel(nn.Module):
    """Stages of one number each, which take the given times; layer s is stage s."""

    def __init__(self, times: StageTimes) -> None:
        super().__init__()
        self.times = times
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in times.forward])

    def run_stage(self, stage: Stage, hidden: Any, **inputs: Tensor) -> Tensor:
        number = stage.layers.start
        time.sleep(self.times.forward[number])
        # Two functions, one on the weight and one on the input: a schedule that splits the backward pass runs them
        # apart.
        factor = SleepBackward.apply(self.factors[number], self.times.backward_weight[number])
        if hidden is None:
            return inputs["x"] * factor
        out: Tensor = SleepBackward.apply(hidden, self.times.backward_input[number])
        return out * factor

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield self


def stage_times(num_ranks: int, stages_per_rank: int, unit: float) -> StageTimes:
    """2 units of each kind on each rank. The first stage has no input, so that its backward is all of its weights."""
    each, count = 2.0 * unit / stages_per_rank, num_ranks * stages_per_rank
    # Forward, backward_input, backward_weight of each stage.
    return StageTimes([each] * count, [0.0] + [each] * (count - 1), [2 * each] + [each] * (count - 1))


def measured(rank: int, world: int, schedules: Sequence[tuple[str, int]], count: int, unit: float) -> list[Timeline]:
    """For each (schedule, stages a rank) the timeline of the quickest step."""
    ctx = build_parallel_context(AxisSizes(pp=world))
    recorder = ScheduleRecorder(ctx.device)
    batches = [{"x": torch.ones(1)} for _ in range(count)]
    timelines = []
    for name, stages_per_rank in schedules:
        schedule = load_plugins()[PIPELINE_SCHEDULES].get(name).schedule.load()
        times = stage_times(world, stages_per_rank, unit)
        num_stages = len(times.forward)
        stages = [Stage(range(s, s + 1), first=s == 0, last=s == num_stages - 1) for s in range(num_stages)]
        model = SleepingModel(times)
        pipeline = Pipeline(model, stages, schedule, ctx, inputs=("x",), recorder=recorder)
        steps = []
        for _ in range(STEPS):
            recorder.begin(ctx.pp)
            pipeline.forward_backward(batches, share)
            steps.append(recorder.gather(ctx.pp))
        # The quickest: other processes of the machine can only delay a step.
        timelines.append(min(steps[1:], key=lambda step: step.makespan))
    return timelines


def share(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return output.sum()


@dataclass(frozen=True)
class PipelineRun:
    """unit: seconds."""

    ranks: int
    micro_batches: int
    unit: float

    def case(self, schedule: PipelineSchedule, measured: Timeline) -> Case:
        """Lengths of a step are in units."""
        times = stage_times(self.ranks, schedule.min_stages_per_rank, self.unit)
        expected = simulate(schedule, self.ranks, self.micro_batches, times)
        return {
            "name": schedule.name,
            "stages_per_rank": schedule.min_stages_per_rank,
            "units": measured.makespan / self.unit,
            "simulated_units": expected.makespan / self.unit,
            "time_ratio": measured.makespan / expected.makespan,
            "bubble": measured.bubble_fraction,
            "simulated_bubble": expected.bubble_fraction,
        }


def pipeline_cases(run: PipelineRun, only: Collection[str], svg: Path | None, host: PluginHost) -> Iterator[Case]:
    """Raises ConfigError for a name in `only` that no plugin registers. svg: a folder for the measured timelines."""
    schedules = chosen_schedules(only, host)
    wanted = [(name, schedule.min_stages_per_rank) for name, schedule in schedules.items()]
    timelines = run_ranks(run.ranks, measured, wanted, run.micro_batches, run.unit, timeout=600)[0]
    for (name, schedule), timeline in zip(schedules.items(), timelines, strict=True):
        if svg is not None:
            svg.mkdir(parents=True, exist_ok=True)
            write_trace(timeline, svg / f"{name}.svg")
        yield run.case(schedule, timeline)


def chosen_schedules(only: Collection[str], host: PluginHost) -> dict[str, PipelineSchedule]:
    registered = {spec.name: spec.schedule.load() for spec in host[PIPELINE_SCHEDULES]}
    for name in only:
        if name not in registered:
            raise ConfigError(f"--only {name}: no such schedule; there are {', '.join(registered)}")
    return {name: schedule for name, schedule in registered.items() if not only or name in only}
