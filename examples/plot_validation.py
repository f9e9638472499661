"""Validation loss over steps, of runs of `mt train`:

python examples/plot_validation.py PICTURE.svg RUN ...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 480, 300, 45
COLOURS = ("#0b6e99", "#c4561a", "#4d8b31", "#7a4fa3")


def curves_of(run: Path) -> dict[str, dict[int, float]]:
    """Name of a loss -> step -> loss. Ends the program for a folder that is no run, and for one without validation."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise SystemExit(f"{run} is no run of mt train: there is no {metrics}")
    curves: dict[str, dict[int, float]] = {}
    for line in map(json.loads, metrics.read_text().splitlines()):
        for key, loss in line.items():
            if line["kind"] == "valid" and key.startswith("valid_loss"):
                name = key.removeprefix("valid_loss").replace("_", " ")
                curves.setdefault(run.name + name, {})[line["iteration"]] = loss
    if not curves:
        raise SystemExit(f"{run} has no validation loss; set train.eval_interval")
    return curves


def text(x: float, y: float, words: str, colour: str = "#333", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


class Axes:
    """Linear in both."""

    def __init__(self, curves: Sequence[dict[int, float]]) -> None:
        values = [value for curve in curves for value in curve.values()]
        self.most = max(step for curve in curves for step in curve)
        self.low, self.high = min(values), max(values)

    def place(self, step: int, loss: float) -> tuple[float, float]:
        share = (loss - self.low) / max(self.high - self.low, 1e-9)
        return MARGIN + (WIDTH - 2 * MARGIN) * step / self.most, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share

    def draw(self) -> list[str]:
        drawn = [text(WIDTH / 2, HEIGHT - 8, "steps"), text(MARGIN, 24, "validation loss")]
        for quarter in range(5):
            loss = self.low + (self.high - self.low) * quarter / 4
            x, y = self.place(0, loss)
            drawn.append(f'<line x1="{x}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            drawn.append(text(x - 6, y + 4, f"{loss:.2f}", anchor="end"))
            step = self.most * quarter // 4
            drawn.append(text(self.place(step, self.low)[0], HEIGHT - MARGIN + 18, str(step)))
        return drawn

    def curve(self, name: str, curve: dict[int, float], number: int) -> list[str]:
        colour = COLOURS[number % len(COLOURS)]
        points = [self.place(step, loss) for step, loss in sorted(curve.items())]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        label = text(WIDTH - MARGIN, MARGIN + 16 * number, name, colour, "end")
        return [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>', label]


def draw(picture: Path, runs: Sequence[Path]) -> None:
    curves = {name: curve for run in runs for name, curve in curves_of(run).items()}
    axes = Axes(list(curves.values()))
    drawn = axes.draw()
    for number, (name, curve) in enumerate(curves.items()):
        drawn += axes.curve(name, curve, number)
        print(f"{name}: {curve[max(curve)]:.4f} after {max(curve)} steps")
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    picture.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>"]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the validation loss over steps.")
    parser.add_argument("picture", type=Path, metavar="PICTURE.svg")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of mt train")
    given = parser.parse_args()
    draw(given.picture, given.runs)
