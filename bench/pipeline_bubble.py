"""Bubbles of pipeline schedules: measured on ranks whose stages sleep, against the simulator's.

    uv run python bench/pipeline_bubble.py [--ranks 4] [--micro-batches 8] [--unit-ms 20] [--only zbv_zero_bubble]
                                              [--pictures DIR]

A rank works 2 units forward, 2 for gradients of inputs and 2 for those of weights on each micro-batch, divided over
its stages, so that all schedules do the same work. Sleeping takes no processor: ranks do not disturb one another, and
what is measured is the schedule and the runtime. Of several steps the quickest counts; the first, which exchanges
shapes, does not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.parallel.pipeline.pipeline import Pipeline
from mt_core.parallel.pipeline.simulator import StageTimes, simulate
from mt_core.parallel.pipeline.stage import Stage
from mt_core.parallel.pipeline.timeline import Timeline
from mt_core.parallel.pipeline.trace import ScheduleRecorder, write_trace
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks

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

    def run_stage(self, stage: Stage, hidden: Tensor | None, x: Tensor) -> Tensor:
        number = stage.layers.start
        time.sleep(self.times.forward[number])
        factor = SleepBackward.apply(self.factors[number], self.times.backward_weight[number])
        if hidden is None:
            return x * factor
        return SleepBackward.apply(hidden, self.times.backward_input[number]) * factor

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield self


def stage_times(num_ranks: int, stages_per_rank: int, unit: float) -> StageTimes:
    """2 units of each kind on each rank. The first stage has no input, so that its backward is all of its weights."""
    each, count = 2.0 * unit / stages_per_rank, num_ranks * stages_per_rank
    return StageTimes([each] * count, [0.0] + [each] * (count - 1), [2 * each] + [each] * (count - 1))


def measured(rank: int, world: int, schedules: Sequence[tuple[str, int]], count: int, unit: float) -> list[Timeline]:
    """For each (schedule, stages a rank) the timeline of the quickest step."""
    ctx = build_parallel_context(AxisSizes(pp=world))
    recorder = ScheduleRecorder(ctx.device)
    batches = [{"x": torch.ones(1)} for _ in range(count)]
    found = []
    for name, stages_per_rank in schedules:
        schedule = load_plugins().pipeline_schedules.get(name).schedule.load()
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
        found.append(min(steps[1:], key=lambda step: step.makespan))
    return found


def share(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return output.sum()


def main() -> None:
    registered = {spec.name: spec.schedule.load() for spec in load_plugins().pipeline_schedules}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    parser.add_argument("--only", action="append", choices=list(registered), help="measure this one; repeatable")
    parser.add_argument("--pictures", type=Path, help="write an SVG of each measured schedule into this folder")
    options = parser.parse_args()
    unit = options.unit_ms / 1000
    chosen = options.only or list(registered)
    schedules = [(name, registered[name].min_stages_per_rank) for name in chosen]
    timelines = run_ranks(options.ranks, measured, schedules, options.micro_batches, unit, timeout=600)[0]
    print(f"{options.ranks} ranks, {options.micro_batches} micro-batches, unit {options.unit_ms:g} ms")
    print(f"{'schedule':24} stages/rank   step, units: measured simulated   ratio   bubble: measured simulated")
    for (name, stages_per_rank), timeline in zip(schedules, timelines, strict=True):
        expected = simulate(
            registered[name], options.ranks, options.micro_batches, stage_times(options.ranks, stages_per_rank, unit)
        )
        print(
            f"{name:24} {stages_per_rank:11}   {timeline.makespan / unit:21.2f} {expected.makespan / unit:9.2f}   "
            f"{timeline.makespan / expected.makespan:5.3f}   {timeline.bubble_fraction:16.3f} "
            f"{expected.bubble_fraction:9.3f}"
        )
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            write_trace(timeline, options.pictures / f"{name}.svg")


if __name__ == "__main__":
    main()
