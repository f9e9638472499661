"""A schedule played with given times, without any process: how long a step takes, and how much of it is bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mt_core.parallel.pipeline.garbage import without_garbage_collection
from mt_core.parallel.pipeline.orders import Action, Kind
from mt_core.parallel.pipeline.placement import ranks_of_stages
from mt_core.parallel.pipeline.playing import play
from mt_core.parallel.pipeline.schedules import get_schedule
from mt_core.parallel.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class StageTimes:
    """How long each stage takes for one micro-batch, in seconds (or any one unit)."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    """Gradient of the input. Where the backward pass is not split, the pass takes both times."""
    backward_weight: Sequence[float]
    """Gradients of the weights. The first stage has no input to give a gradient: all of its backward is here."""
    transfer: float = 0.0
    """From the end of a stage's work until another rank can go on with the result. Ranks compute meanwhile."""

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
def simulate(schedule: str, num_ranks: int, num_micro_batches: int, times: StageTimes) -> Timeline:
    """The timeline of one step. The number of stages is that of the times.

    Raises ConfigError when the schedule does not exist or the stages do not fit it.
    """
    chosen, num_stages = get_schedule(schedule), len(times.forward)
    order = chosen.order(num_ranks, num_stages, num_micro_batches)
    places = ranks_of_stages(num_stages, num_ranks, chosen.placement)

    def delay(maker: int, reader: int) -> float:
        return 0.0 if places[maker] == places[reader] else times.transfer

    starts = play(order, times.of, delay)
    return Timeline(
        tuple(
            tuple(Span(action, start, start + times.of(action)) for action, start in zip(actions, rank, strict=True))
            for actions, rank in zip(order, starts, strict=True)
        )
    )
