"""A timeline as an SVG image: a row per rank, and a box per action with the index of its micro-batch."""

from __future__ import annotations

from mt_core.parallel.pipeline.schedule_tables import Kind
from mt_core.parallel.pipeline.timeline import COMPUTATION, Span, Timeline

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
