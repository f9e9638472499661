"""Recall over the number of passages, of results of `mt retrieve evaluate --output`:

python examples/plot_recall.py PICTURE.svg RESULT.json ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import log
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 480, 300, 45
COLOURS = ("#0b6e99", "#c4561a", "#4d8b31", "#7a4fa3")


def place(k: int, recall: float, most: int) -> tuple[float, float]:
    """k on a logarithmic axis, recall from 0 to 1."""
    x = MARGIN + (WIDTH - 2 * MARGIN) * log(k) / max(log(most), 1e-9)
    return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * recall


def text(x: float, y: float, words: str, colour: str = "#333", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def axes(ks: Sequence[int]) -> list[str]:
    drawn = [text(WIDTH / 2, HEIGHT - 8, "passages"), text(MARGIN, 24, "recall")]
    drawn += [text(place(k, 0, ks[-1])[0], HEIGHT - MARGIN + 18, str(k)) for k in ks]
    for recall in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(1, recall, ks[-1])
        drawn.append(f'<line x1="{x}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        drawn.append(text(x - 6, y + 4, f"{recall:g}", anchor="end"))
    return drawn


def curve(name: str, recalls: dict[int, float], number: int) -> list[str]:
    colour, most = COLOURS[number % len(COLOURS)], max(recalls)
    points = [place(k, recall, most) for k, recall in sorted(recalls.items())]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    label = text(WIDTH - MARGIN, HEIGHT - MARGIN - 12 - 16 * number, name, colour, "end")
    return [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots, label]


def draw(picture: Path, results: Sequence[Path]) -> None:
    found = [json.loads(path.read_text())["recall"] for path in results]
    recalls = [{int(k): value for k, value in values.items()} for values in found]
    drawn = axes(sorted(recalls[0]))
    for number, (path, values) in enumerate(zip(results, recalls, strict=True)):
        drawn += curve(path.stem, values, number)
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    picture.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>"]) + "\n")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
