"""Simulation of a schedule with given times: the duration of a step and its bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.placement import ranks_of_stages
from mt_core.parallel.pipeline.schedule_tables import Action, Kind
from mt_core.parallel.pipeline.schedules import PipelineSchedule
from mt_core.parallel.pipeline.start_times import start_times
from mt_core.parallel.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class StageTimes:
    """How long each stage takes for one micro-batch, in seconds (or any one unit)."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    """Gradient of the input. Where the backward pass is not split, the pass takes both times."""
    backward_weight: Sequence[float]
    """Weight gradients. The first stage has no input gradient: its whole backward pass is counted here."""
    transfer: float = 0.0
    """Latency of a transfer: from the end of an action until another rank has its result. Overlaps computation."""

    @classmethod
    def even(cls, num_stages: int, forward: float, backward: float, transfer: float = 0.0) -> StageTimes:
        """Stages alike; half of the backward pass is for the input, also in the first stage."""
        half = [backward / 2] * num_stages
        return cls([forward] * num_stages, half, half, transfer)

    def of(self, action: Action) -> float:
        if action.kind is Kind.FORWARD:
            return self.forward[action.stage]
        if action.kind is Kind.BACKWARD_INPUT:
            return self.backward_input[action.stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight[action.stage]
        return self.backward_input[action.stage] + self.backward_weight[action.stage]


@without_garbage_collection()
def simulate(schedule: PipelineSchedule, num_ranks: int, num_micro_batches: int, times: StageTimes) -> Timeline:
    """The timeline of one step. The number of stages is that of the times.

    Raises ConfigError when the stages do not fit the schedule.
    """
    num_stages = len(times.forward)
    order = schedule.order(num_ranks, num_stages, num_micro_batches)
    places = ranks_of_stages(num_stages, num_ranks, schedule.placement)

    def delay(maker: int, reader: int) -> float:
        # Neighbouring stages share a rank at the turn of a V, and everywhere with one rank.
        return 0.0 if places[maker] == places[reader] else times.transfer

    starts = start_times(order, times.of, delay)
    return Timeline(
        tuple(
            tuple(Span(action, start, start + times.of(action)) for action, start in zip(actions, rank, strict=True))
            for actions, rank in zip(order, starts, strict=True)
        )
    )
