"""Timeline of a pipeline step, measured or simulated: its bubble, its picture, its simulation with given times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, ranks_of_stages, start_times
from mt_core.parallel.pipeline.schedules import PipelineSchedule

COMPUTATION = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))


class Span(NamedTuple):
    """An action from `start` to `end`, in seconds (or any unit). For a receive, the wait."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, in order, on a common clock."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the start of the first computation to the end of the last, over all ranks."""
        spans = [span for rank in self.ranks for span in rank if span.action.kind in COMPUTATION]
        # Waits for inputs are not counted at either end: a receive that is posted early is no work.
        return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0

    def busy(self, rank: int) -> float:
        """Compute time of a rank."""
        return sum(span.end - span.start for span in self.ranks[rank] if span.action.kind in COMPUTATION)

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all ranks' time, from the first start to the last end."""
        whole = self.makespan * len(self.ranks)
        return 1.0 - sum(map(self.busy, range(len(self.ranks)))) / whole if whole else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle over busy time, which is (p - 1) / m for GPipe and 1F1B of p even stages and m micro-batches."""
        # fraction = idle / (idle + busy), so this is idle / busy, the bubble of Narayanan et al. (2021).
        return self.bubble_fraction / (1.0 - self.bubble_fraction)


# -- an SVG image: a row per rank, and a box per action with the index of its micro-batch -----------------

ROW, GAP, LEFT, TOP, WIDTH = 26, 6, 64, 56, 1200
SMALLEST_WITH_NUMBER = 12.0
"""Minimum width in pixels of a box with a number."""

COLOURS = {
    Kind.FORWARD: "#8fb8de",
    Kind.BACKWARD: "#e3a35f",
    Kind.BACKWARD_INPUT: "#e8bd6d",
    Kind.BACKWARD_WEIGHT: "#9cc08b",
    Kind.RECEIVE_FORWARD: "#e9e9ec",
    Kind.RECEIVE_BACKWARD: "#e9e9ec",
}
LEGEND = (
    (Kind.FORWARD, "forward"),
    (Kind.BACKWARD, "backward"),
    (Kind.BACKWARD_INPUT, "backward, input"),
    (Kind.BACKWARD_WEIGHT, "backward, weights"),
    (Kind.RECEIVE_FORWARD, "waiting"),
)


def draw(timeline: Timeline) -> str:
    """SVG text. Boxes of a rank's later stages are darker. Sends, which take almost no time, are omitted."""
    spans = [span for rank in timeline.ranks for span in rank]
    zero = min((span.start for span in spans), default=0.0)
    scale = WIDTH / (max((span.end for span in spans), default=1.0) - zero)
    height = TOP + len(timeline.ranks) * (ROW + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + GAP}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="18">bubble {timeline.bubble_fraction:.1%} of the ranks\' time</text>',
        *_legend(),
    ]
    for rank, row in enumerate(timeline.ranks):
        y = TOP + rank * (ROW + GAP)
        # Stage -> 0 for the rank's first stage, 1 for its second, ...
        first_stage = {stage: place for place, stage in enumerate(sorted({span.action.stage for span in row}))}
        lines.append(f'<text x="{GAP}" y="{y + ROW / 2 + 4}">rank {rank}</text>')
        for span in row:
            if span.action.kind in COLOURS:
                x, width = LEFT + (span.start - zero) * scale, (span.end - span.start) * scale
                lines += _box(span, x, y, width, first_stage[span.action.stage])
    return "\n".join([*lines, "</svg>", ""])


def _legend() -> list[str]:
    lines = []
    for place, (kind, name) in enumerate(LEGEND):
        x = LEFT + place * 140
        lines.append(f'<rect x="{x}" y="28" width="14" height="14" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 19}" y="39">{name}</text>')
    return lines


def _box(span: Span, x: float, y: float, width: float, turn: int) -> list[str]:
    """turn: whether it is the rank's first, second, ... stage."""
    kind, stage, number = span.action
    name = f"{kind.value}, stage {stage}, micro-batch {number}, {span.end - span.start:.4g} s"
    frame = 'stroke="white" stroke-width="0.5"' if kind in COMPUTATION else ""
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}"'
    lines = [f'<rect {place} fill="{COLOURS[kind]}" {frame}><title>{name}</title></rect>']
    if kind in COMPUTATION and turn:
        lines.append(f'<rect {place} fill="black" opacity="{min(0.12 * turn, 0.5):.2f}" pointer-events="none"/>')
    if kind in COMPUTATION and width >= SMALLEST_WITH_NUMBER:
        middle = f'x="{x + width / 2:.2f}" y="{y + ROW / 2 + 4}"'
        lines.append(f'<text {middle} text-anchor="middle" pointer-events="none">{number}</text>')
    return lines


# -- simulation of a schedule with given times ------------------------------------------------------------


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
