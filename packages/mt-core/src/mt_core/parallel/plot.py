"""A parallel layout as an SVG image: the rank of each process on the axes, and what the ranks share."""

from __future__ import annotations

from mt_core.errors import ConfigError
from mt_core.parallel.context import AxisName, AxisSizes, axis_members

BOX_W, BOX_H, GAP, LEFT, TOP = 58, 40, 8, 96, 92
NARROWEST = 660
"""Minimum width of the picture in pixels."""
LARGEST = 512
"""Maximum number of ranks that are legible."""
COLOURS = ("#8fb8de", "#e3a35f", "#9cc08b", "#c79fc9", "#e8d06d", "#7fc6c0", "#d98880", "#b0b0c0")


def draw_layout(sizes: AxisSizes, world_size: int) -> str:
    """SVG text: a column for each pipeline stage, a row for each data-parallel copy, in it a box for each rank, its
    colour the slice of the matrices and its row the part of the sequence that it has.

    Raises ConfigError for a layout that does not fit, and for more ranks than a picture can show.
    """
    if world_size > LARGEST:
        raise ConfigError(f"a picture shows up to {LARGEST} ranks, not {world_size}; use fewer data-parallel copies")
    place = places(sizes, world_size)
    copies = sizes.dp(world_size)
    column, row = sizes.tp * BOX_W + 4 * GAP, sizes.cp * BOX_H + 4 * GAP
    width, height = max(LEFT + sizes.pp * column + GAP, NARROWEST), TOP + copies * row
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(sizes),
        *(
            f'<text x="{LEFT + stage * column}" y="{TOP - 10}">pipeline rank {stage}</text>'
            for stage in range(sizes.pp)
        ),
        *(f'<text x="{GAP}" y="{TOP + copy * row + 24}">copy {copy}</text>' for copy in range(copies)),
    ]
    for stage in range(sizes.pp):
        for copy in range(copies):
            lines.append(
                f'<rect x="{LEFT + stage * column - GAP}" y="{TOP + copy * row - GAP}" '
                f'width="{column - 2 * GAP - 4}" height="{row - 2 * GAP - 6}" rx="5" fill="none" stroke="#999"/>'
            )
    for rank in range(world_size):
        at = place[rank]
        x = LEFT + at["pp"] * column + at["tp"] * BOX_W
        y = TOP + at["dp"] * row + at["cp"] * BOX_H
        lines.append(
            f'<rect x="{x}" y="{y}" width="{BOX_W - 4}" height="{BOX_H - 6}" rx="3" '
            f'fill="{COLOURS[at["tp"] % len(COLOURS)]}"><title>{_title(rank, at)}</title></rect>'
        )
        label = f"{rank} e{at['ep']}" if sizes.ep > 1 else str(rank)
        lines.append(f'<text x="{x + BOX_W / 2 - 2}" y="{y + 22}" text-anchor="middle">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


def places(sizes: AxisSizes, world_size: int) -> list[dict[AxisName, int]]:
    """For each rank, its place on every dense axis."""
    place_of: list[dict[AxisName, int]] = [{} for _ in range(world_size)]
    members = axis_members(world_size, sizes)
    axes: tuple[AxisName, ...] = ("tp", "cp", "dp", "pp", "ep")
    for axis in axes:
        for ranks in members[axis]:
            for place, rank in enumerate(ranks):
                place_of[rank][axis] = place
    return place_of


def _title(rank: int, at: dict[AxisName, int]) -> str:
    return f"rank {rank}: " + ", ".join(f"{axis} {place}" for axis, place in at.items())


def _legend(sizes: AxisSizes) -> list[str]:
    letter = "" if sizes.ep == 1 else f"; e: slice of the experts (expert parallel, {sizes.ep})"
    lines = [f'<text x="{GAP}" y="20">colour: slice of every matrix (tensor parallel, {sizes.tp}){letter}</text>']
    rows = "one row" if sizes.cp == 1 else f"{sizes.cp} rows"
    lines.append(
        f'<text x="{GAP}" y="38">{rows} in a frame: part of every sequence (context parallel, {sizes.cp}); '
        "a frame: a stage of one copy of the model</text>"
    )
    experts = "" if sizes.ep == 1 else ", but for the experts"
    lines.append(f'<text x="{GAP}" y="56">frames of a column have the same weights and other samples{experts}</text>')
    return lines
