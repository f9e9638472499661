"""Checkpoints: the files of a real one, how another layout reads them, and which are kept."""

from __future__ import annotations

from pathlib import Path

import torch
from scripts.figures.registry import figure, recorded
from scripts.figures.svg import Canvas

from mt_core.nn.layout import ParameterLayout, Split, zeros
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.retention import superfluous


@figure("checkpoint-files")
def files() -> Canvas:
    """What stands in the files that two tensor-parallel ranks wrote."""
    found = recorded("checkpoint")
    shards = {name: size for name, size in found["files"].items() if name.endswith(".safetensors")}
    canvas = Canvas(
        860, 66 + 46 * len(shards), "Files of a checkpoint of gpt-tiny, written by two tensor-parallel ranks"
    )
    canvas.text(12, 20, "iter_0000002: each rank writes the slices that it holds", style="big")
    kinds = {"model": 0, "optimizer": 1}
    largest = max(shards.values())
    for row, (name, size) in enumerate(shards.items()):
        y = 66 + 46 * row
        canvas.text(12, y - 4, f"{name}, {size:,} bytes", style="small muted mono")
        canvas.rect(12, y, 836 * size / largest, 26, "grey")
        for tensor, entry in found["manifest"]["tensors"].items():
            for piece in entry["pieces"]:
                if piece["shard"] == name:
                    count = 1
                    for length in piece["shape"]:
                        count *= length
                    width = {"F32": 4, "F64": 8, "I64": 8, "BF16": 2}.get(entry["dtype"], 1)
                    colour = (
                        2
                        if tensor.startswith("optimizer") and "exp_avg_sq" in tensor
                        else kinds.get(tensor.split(".")[0], 3)
                    )
                    canvas.rect(
                        12 + piece["offset"] * 836 / largest,
                        y,
                        max(count * width * 836 / largest, 0.7),
                        26,
                        f"c{colour}",
                        stroke="rule",
                        title=f"{tensor} {piece['shape']} at {piece['start']}",
                    )
    canvas.legend(
        12,
        36,
        [
            ("c0", "weights"),
            ("c1", "first moments"),
            ("c2", "second moments"),
            ("c3", "other state"),
            ("grey", "header"),
        ],
    )
    return canvas


def context(axis: str, rank: int, size: int) -> ParallelContext:
    return ParallelContext(torch.device("cpu"), axes={axis: Axis(size, rank, None, tuple(range(size)))})  # type: ignore[dict-item]


@figure("checkpoint-reshard")
def reshard() -> Canvas:
    """A gated matrix saved by two ranks and read by three."""
    layout = ParameterLayout((24, 8), zeros, (Split(0, "tp", sections=2),))
    canvas = Canvas(860, 300, "A gated matrix of 24 rows, saved by two tensor-parallel ranks and read by three")
    canvas.text(12, 20, "linear_fc1 of a gated feed-forward, 24 rows: gate rows 0 to 11, up rows 12 to 23", style="big")
    cell = 10
    canvas.text(40, 44, "canonical", style="muted")
    canvas.rect(40, 52, 80, 120, "c6", stroke="edge")
    canvas.rect(40, 172, 80, 120, "c7", stroke="edge")
    canvas.text(80, 116, "gate", anchor="middle")
    canvas.text(80, 236, "up", anchor="middle")
    for place, (size, word) in enumerate(((2, "saved by 2 ranks"), (3, "read by 3 ranks"))):
        left = 210 + 310 * place
        canvas.text(left, 44, word, style="muted")
        for rank in range(size):
            x = left + rank * 92
            canvas.text(x, 62, f"rank {rank}", style="small muted")
            for region in layout.regions(context("tp", rank, size)):
                top, height = region.canonical.start[0], region.canonical.shape[0]
                y = 70 + region.local[0] * cell
                canvas.cell(x, y, 80, height * cell, f"rows {top} to {top + height - 1}", f"c{rank}", style="small")
    canvas.text(210, 250, "A checkpoint says for each piece where it stands in the canonical tensor.", style="muted")
    canvas.text(210, 270, "A reader asks for its own regions, and reads the bytes that meet them.", style="muted")
    canvas.arrow(470, 130, 508, 130)
    return canvas


@figure("checkpoint-retention")
def retention() -> Canvas:
    """Which checkpoints are there after each save, with keep_last = 3 and keep_every = 400."""
    canvas = Canvas(700, 300, "Checkpoints after each save every 100 steps, with keep_last = 3 and keep_every = 400")
    canvas.text(12, 20, "save_interval = 100, keep_last = 3, keep_every = 400", style="big")
    there: list[Path] = []
    for row, step in enumerate(range(100, 1300, 100)):
        there.append(Path(f"iter_{step:07d}"))
        gone = superfluous(there, 3, 400, ())
        y = 34 + 21 * row
        canvas.text(96, y + 14, f"step {step:,}", anchor="end", style="small muted")
        for path in there:
            number = int(path.name[5:])
            x = 104 + (number // 100 - 1) * 48
            fill = "none" if path in gone else "c2" if number % 400 == 0 else "c0"
            canvas.cell(x, y, 46, 19, str(number), fill, style="small muted" if path in gone else "small")
        there = [path for path in there if path not in gone]
    canvas.legend(104, 300 - 4, [("c0", "one of the last three"), ("c2", "kept by keep_every"), ("none", "removed")])
    return canvas
