"""Drawings: the layout, the timeline of a pipeline step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mt_ops.reading.json_lines import read_json
from mt_ops.reading.run import Run
from mt_ops.report.html import Section, details, note

# -- layout ------------------------------------------------------------------------------------------

MOST_RANKS = 512
SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def layout(runs: Sequence[Run]) -> Section | None:
    """The ranks of each run: columns are pipeline ranks, rows are copies of the model."""
    drawn: dict[str, list[str]] = {}
    for run in runs:
        if (picture := _layout(run)) is not None:
            drawn.setdefault(picture, []).append(run.name)
    parts = [details(", ".join(names), picture, is_open=len(drawn) == 1) for picture, names in drawn.items()]
    return Section("layout", "Layout", "".join(parts)) if parts else None


def _layout(run: Run) -> str | None:
    world = run.environment.get("world_size")
    if not isinstance(world, int) or not run.config:
        return None
    sizes = {axis: int(run.config.get(f"parallel.{key}") or 1) for axis, key in SIZES.items()}
    tp, cp, pp = sizes["tp"], sizes["cp"], sizes["pp"]
    dp = world // (tp * cp * pp)
    words = f"{world} ranks: tensor {tp}, context {cp}, pipeline {pp}, data {dp}, expert {sizes['ep']} parallel"
    if world > MOST_RANKS or dp < 1:
        return note(words)
    boxes, column, row = [], tp * 44 + 24, cp * 30 + 16
    for rank in range(world):
        # rank = ((pp * DP + dp) * CP + cp) * TP + tp
        place, t = divmod(rank, tp)
        place, c = divmod(place, cp)
        p, d = divmod(place, dp)
        x, y = 8 + p * column + t * 44, 28 + d * row + c * 30
        title = f"<title>rank {rank}: pipeline {p}, data {d}, context {c}, tensor {t}</title>"
        boxes.append(f'<rect class="c{t % 10}" x="{x}" y="{y}" width="40" height="26" rx="3">{title}</rect>')
        boxes.append(f'<text x="{x + 20}" y="{y + 17}" text-anchor="middle">{rank}</text>')
    heads = "".join(f'<text class="label" x="{8 + p * column}" y="18">pipeline {p}</text>' for p in range(pp))
    svg = (
        f'<svg role="img" aria-label="{words}" width="{max(16 + pp * column, 120)}" height="{36 + dp * row}">'
        f"{heads}{''.join(boxes)}</svg>"
    )
    return f'{note(words + "; a colour is a slice of every matrix")}<div class="scroll" tabindex="0">{svg}</div>'


# -- timeline of a pipeline step ---------------------------------------------------------------------

KINDS = {
    "F": ("c0", "forward"),
    "B": ("c1", "backward"),
    "I": ("c4", "backward, input"),
    "W": ("c2", "backward, weights"),
}
TIMELINE_WIDTH = 1000


def timeline(runs: Sequence[Run]) -> Section | None:
    """What ran when on each pipeline stage, of runs with logging.trace_schedule in JSON."""
    parts = [details(run.name, svg, is_open=True) for run in runs if (svg := _timeline(run)) is not None]
    return Section("timeline", "Timeline of a pipeline step", "".join(parts)) if parts else None


def _timeline(run: Run) -> str | None:
    file = run.config.get("logging.trace_schedule")
    if not isinstance(file, str) or not file.endswith(".json"):
        return None
    content = next((trace for path in (Path(file), run.path / Path(file).name) if (trace := read_json(path))), None)
    if not isinstance(content, Mapping) or "traceEvents" not in content:
        return None
    spans = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    if not spans:
        return None
    begin = min(event["ts"] for event in spans)
    scale = TIMELINE_WIDTH / (max(event["ts"] + event["dur"] for event in spans) - begin)
    ranks = sorted({event["pid"] for event in spans})
    boxes = "".join(_span(event, begin, scale, ranks) for event in spans)
    labels = "".join(f'<text class="label" x="0" y="{i * 26 + 17}">rank {rank}</text>' for i, rank in enumerate(ranks))
    bubble = content.get("otherData", {}).get("bubble_fraction")
    words = f"{len(ranks)} pipeline ranks" + (f", bubble {bubble:.1%}" if isinstance(bubble, float) else "")
    svg = (
        f'<svg role="img" aria-label="timeline of {words}" width="{TIMELINE_WIDTH + 64}" height="{len(ranks) * 26}">'
        f"{labels}{boxes}</svg>"
    )
    return note(words) + f'<div class="scroll" tabindex="0">{svg}</div>'


def _span(event: Mapping[str, Any], begin: float, scale: float, ranks: Sequence[int]) -> str:
    colour, kind = KINDS.get(str(event.get("cat")), ("h0", "waiting"))
    x, width = 64 + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.5)
    number = event.get("args", {}).get("micro_batch", "")
    title = f"<title>{escape(kind)}, micro-batch {number}, {event['dur'] / 1000:.3g} ms</title>"
    place = f'x="{x:.1f}" y="{ranks.index(event["pid"]) * 26}" width="{width:.1f}" height="22"'
    return f'<rect class="{colour}" {place}>{title}</rect>'
