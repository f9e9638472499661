"""A picture as SVG text, for papers: vector lines, no fonts embedded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape

import numpy as np

from mt_ops.plot.curves import Picture

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 16, 48
COLOURS = ("#3b7dd8", "#d9731a", "#2f9e63", "#a557c4", "#c9a21b", "#1aa3a3", "#d64b6a", "#7a8794")
DASHES = ("", "6 3", "2 2")
TICKS = 6
LETTER = 8
"""Pixels of a digit at most."""


def draw(picture: Picture) -> str:
    """SVG text."""
    xs = np.concatenate([curve.x for curve in picture.curves])
    ys = np.concatenate([curve.y for curve in picture.curves])
    x = Scale(*limits(xs, picture.log_x, 0.0), LEFT, WIDTH - RIGHT, picture.log_x)
    y = Scale(*limits(ys, picture.log_y, 0.05), HEIGHT - BOTTOM, TOP, picture.log_y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_axes(picture, x, y),
        *_curves(picture, x, y),
        *_legend(picture),
    ]
    return "\n".join([*lines, "</svg>", ""])


class Scale:
    """From values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float, log: bool) -> None:
        self.low, self.high, self.begin, self.end, self.log = low, high, begin, end, log
        self._of: Callable[[np.ndarray], np.ndarray] = np.log if log else np.asarray

    def __call__(self, value: np.ndarray | float) -> np.ndarray:
        low, high = self._of(np.asarray(self.low)), self._of(np.asarray(self.high))
        return self.begin + (self._of(np.asarray(value)) - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def limits(values: np.ndarray, log: bool, space: float) -> tuple[float, float]:
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not low < high:
        low, high = (
            (low / 2, low * 2) if log and math.isfinite(low) else (low - 1, low + 1) if math.isfinite(low) else (0, 1)
        )
    if log:
        return low, high
    return low - space * (high - low), high + space * (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    whole = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(whole) > 1:
        return whole[:: -(-len(whole) // 8)]
    finer = [10.0**power * factor for power in powers for factor in (1, 2, 3, 5)]
    inside = [tick for tick in finer if low <= tick <= high]
    return inside if len(inside) > 2 else _ticks(low, high)


def _axes(picture: Picture, x: Scale, y: Scale) -> Iterator[str]:
    for tick in x.ticks():
        at = float(x(tick))
        yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e4e7ea"/>'
        label = short(tick)
        # The last one ends with the picture.
        center = min(at, WIDTH - 2 - len(label) * LETTER / 2)
        yield f'<text x="{center:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>'
    for tick in y.ticks():
        at = float(y(tick))
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e4e7ea"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(tick)}</text>'
    middle, center = (HEIGHT - BOTTOM + TOP) / 2, (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{center}" y="{HEIGHT - 10}" text-anchor="middle">{escape(picture.x_label)}</text>'
    yield f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(picture.y_label)}</text>'


def _curves(picture: Picture, x: Scale, y: Scale) -> Iterator[str]:
    for place, curve in enumerate(picture.curves):
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x(curve.x), y(curve.y), strict=True))
        yield f'<polyline points="{points}" fill="none" {_stroke(place)}><title>{escape(curve.name)}</title></polyline>'


def _stroke(place: int) -> str:
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="1.5"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _legend(picture: Picture) -> Iterator[str]:
    if len(picture.curves) < 2:
        return
    left = WIDTH - RIGHT - 190
    for place, curve in enumerate(picture.curves):
        y = TOP + 16 + 17 * place
        yield f'<line x1="{left}" y1="{y - 4}" x2="{left + 22}" y2="{y - 4}" {_stroke(place)}/>'
        yield f'<text x="{left + 28}" y="{y}">{escape(curve.name)}</text>'


def short(value: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):.4g}{letter}"
    return f"{value:.4g}"
