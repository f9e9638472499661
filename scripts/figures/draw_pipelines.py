"""Pipeline schedules, as the simulation plays their tables, and what they cost."""

from __future__ import annotations

from scripts.figures.axes import Axes
from scripts.figures.registry import figure
from scripts.figures.svg import Canvas

from mt_core.parallel.pipeline.partition import balanced_stages
from mt_core.parallel.pipeline.schedule_tables import Kind, ranks_of_stages
from mt_core.parallel.pipeline.schedules import (
    DUALPIPE_V,
    GPIPE,
    INTERLEAVED_1F1B,
    INTERLEAVED_ZERO_BUBBLE,
    ONE_F_ONE_B,
    ZBV_ZERO_BUBBLE,
    PipelineSchedule,
)
from mt_core.parallel.pipeline.timeline import StageTimes, Timeline, simulate

RANKS, MICRO_BATCHES = 4, 8
FILLS = {
    Kind.FORWARD: "c0",
    Kind.BACKWARD: "c1",
    Kind.BACKWARD_INPUT: "c6",
    Kind.BACKWARD_WEIGHT: "c2",
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of the input",
    Kind.BACKWARD_WEIGHT: "backward of the weights",
}


def played(schedule: PipelineSchedule, stages_per_rank: int, micro_batches: int = MICRO_BATCHES) -> Timeline:
    """A step in which the whole model takes a rank 1 unit forward and 2 backward for a micro-batch."""
    times = StageTimes.even(RANKS * stages_per_rank, 1.0 / stages_per_rank, 2.0 / stages_per_rank)
    return simulate(schedule, RANKS, micro_batches, times)


def timeline(schedule: PipelineSchedule, stages_per_rank: int) -> Canvas:
    played_step = played(schedule, stages_per_rank)
    end = max(span.end for rank in played_step.ranks for span in rank)
    canvas = Canvas(
        860, 206, f"Timeline of one step under {schedule.name}: {RANKS} ranks, {MICRO_BATCHES} micro-batches"
    )
    scale, row = (860 - 76) / end, 30
    bubble = f"bubble {played_step.bubble_fraction:.0%} of the ranks' time, {end:g} units a step"
    canvas.text(8, 18, schedule.name, style="big")
    canvas.text(852, 18, bubble, anchor="end", style="muted")
    kinds = {span.action.kind for rank in played_step.ranks for span in rank}
    canvas.legend(64, 42, [(fill, NAMES[kind]) for kind, fill in FILLS.items() if kind in kinds])
    for rank, spans in enumerate(played_step.ranks):
        y = 54 + rank * (row + 4)
        canvas.text(8, y + 20, f"rank {rank}")
        canvas.rect(64, y, end * scale, row, "grey")
        order = sorted({span.action.stage for span in spans})
        for span in spans:
            kind, stage, number = span.action
            x, width = 64 + span.start * scale, (span.end - span.start) * scale
            title = f"{NAMES[kind]}, stage {stage}, micro-batch {number}"
            canvas.rect(x, y, width, row, FILLS[kind], stroke="rule", title=title)
            # The second stage of a rank has a bar at its lower edge.
            if order.index(stage):
                canvas.rect(x, y + row - 5, width, 5, f"p{FILLS[kind][1]}")
            if width > 9:
                canvas.text(x + width / 2, y + 18, str(number), anchor="middle", style="small")
    return canvas


@figure("pipeline-gpipe")
def gpipe() -> Canvas:
    return timeline(GPIPE, 1)


@figure("pipeline-1f1b")
def one_f_one_b() -> Canvas:
    return timeline(ONE_F_ONE_B, 1)


@figure("pipeline-interleaved")
def interleaved() -> Canvas:
    return timeline(INTERLEAVED_1F1B, 2)


@figure("pipeline-zero-bubble")
def zero_bubble() -> Canvas:
    return timeline(INTERLEAVED_ZERO_BUBBLE, 1)


@figure("pipeline-zbv")
def zbv() -> Canvas:
    return timeline(ZBV_ZERO_BUBBLE, 2)


@figure("pipeline-dualpipe-v")
def dualpipe_v() -> Canvas:
    return timeline(DUALPIPE_V, 2)


SCHEDULES = (
    (GPIPE, 1, "gpipe"),
    (ONE_F_ONE_B, 1, "1f1b"),
    (INTERLEAVED_1F1B, 2, "interleaved_1f1b, 2 stages a rank"),
    (INTERLEAVED_ZERO_BUBBLE, 1, "interleaved_zero_bubble, 1 stage"),
    (ZBV_ZERO_BUBBLE, 2, "zbv_zero_bubble"),
    (DUALPIPE_V, 2, "dualpipe_v"),
)


@figure("pipeline-bubble")
def bubble() -> Canvas:
    """Share of the ranks' time that is idle, over the number of micro-batches."""
    canvas = Canvas(680, 340, "Bubble of each schedule over the number of micro-batches, four ranks")
    numbers = [4, 6, 8, 12, 16, 24, 32, 48, 64]
    axes = Axes(canvas, (4, 64), (0, 0.5), x_log=True, x_ticks=[4, 8, 16, 32, 64])
    axes.frame("micro-batches of a step", "idle share of the ranks' time", "4 ranks, simulated")
    for colour, (schedule, stages, _) in enumerate(SCHEDULES):
        if schedule is GPIPE:  # the same as 1f1b
            continue
        axes.curve([(m, played(schedule, stages, m).bubble_fraction) for m in numbers], colour)
    axes.legend(["gpipe and 1f1b", *(name for _, _, name in SCHEDULES[2:])], range(1, 6))
    return canvas


@figure("pipeline-activations")
def activations() -> Canvas:
    """Micro-batches whose activations each rank holds at once: forward passes that have run less those undone."""
    canvas = Canvas(680, 300, "Most activations that each rank holds at once, by schedule")
    names = ("gpipe", "1f1b", "interleaved", "zero bubble", "zbv", "dualpipe_v")
    axes = Axes(canvas, (-0.5, 5.5), (0, 9), x_ticks=range(6), right=120, top=40, names=dict(enumerate(names)))
    axes.frame("schedule", "micro-batches of a rank's layers", f"{RANKS} ranks, {MICRO_BATCHES} micro-batches")
    for place, (schedule, stages, _) in enumerate(SCHEDULES):
        for rank, spans in enumerate(played(schedule, stages).ranks):
            axes.bar(place + (rank - 1.5) * 0.2, 0, most_held(spans) / stages, 0.18, f"c{rank}", f"rank {rank}")
    for rank in range(RANKS):
        canvas.rect(574, 44 + 18 * rank, 12, 12, f"c{rank}")
        canvas.text(592, 54 + 18 * rank, f"rank {rank}")
    return canvas


def most_held(spans: tuple) -> int:  # type: ignore[type-arg]
    held = most = 0
    for span in sorted(spans, key=lambda span: span.start):
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(span.action.kind, 0)
        most = max(most, held)
    return most


@figure("pipeline-placement")
def placement() -> Canvas:
    """Ranks of eight stages, in a loop and in a V."""
    canvas = Canvas(560, 190, "Placement of eight stages on four ranks: in a loop, and in a V")
    for row, kind in enumerate(("loop", "v")):
        y = 24 + row * 84
        canvas.text(8, y + 16, {"loop": "loop", "v": "V"}[kind], style="big")
        for stage, rank in enumerate(ranks_of_stages(8, 4, kind)):  # type: ignore[arg-type]
            x = 70 + stage * 58
            canvas.cell(x, y - 8, 50, 40, f"stage {stage}", f"c{rank}", style="small")
            canvas.text(x + 25, y + 48, f"rank {rank}", anchor="middle", style="muted small")
            if stage < 7:
                canvas.line(x + 50, y + 12, x + 58, y + 12)
    return canvas


@figure("pipeline-stages")
def stages() -> Canvas:
    """Layers of each stage when the embedding and the LM head are counted."""
    layers = balanced_stages(30, 4, embedding_cost=1, output_cost=3)
    canvas = Canvas(
        680, 172, "30 layers on four stages, with the embedding counted as one layer and the LM head as three"
    )
    for number, stage in enumerate(layers):
        y = 26 + number * 34
        count = len(stage.layers)
        parts = (
            [("embedding", 1, "c1")] * (number == 0)
            + [("layer", 1, "c0")] * count
            + [("LM head", 3, "c2")] * (number == 3)
        )
        x = 70.0
        canvas.text(8, y + 17, f"stage {number}")
        for _, cost, fill in parts:
            canvas.rect(x, y, cost * 44, 26, fill, stroke="rule")
            x += cost * 44
        canvas.text(x + 8, y + 17, f"{count} layers", style="muted")
    canvas.legend(70, 16, [("c1", "embedding"), ("c0", "layer"), ("c2", "LM head")])
    return canvas
