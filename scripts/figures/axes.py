"""Axes of plots: curves, bars and heat maps on a canvas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.figures.svg import Canvas, width_of

Points = Sequence[tuple[float, float]]


def ticks_of(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two limits."""
    raw = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def written(value: float) -> str:
    """A number as a tick shows it."""
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


@dataclass
class Axes:
    """A rectangle of a canvas with two scales. x and y: (smallest, largest) value; log: a logarithmic scale of y."""

    canvas: Canvas
    x: tuple[float, float]
    y: tuple[float, float]
    left: float = 62
    top: float = 34
    right: float = 16
    bottom: float = 44
    log: bool = False
    x_log: bool = False
    x_ticks: Sequence[float] | None = None
    y_ticks: Sequence[float] | None = None
    width: float | None = None
    """Of the rectangle; None: the rest of the canvas."""
    height: float | None = None
    names: Mapping[float, str] = field(default_factory=dict)
    """Texts of ticks of x in place of their numbers."""

    def __post_init__(self) -> None:
        self.width = self.canvas.width - self.left - self.right if self.width is None else self.width
        self.height = self.canvas.height - self.top - self.bottom if self.height is None else self.height

    def at(self, x: float, y: float) -> tuple[float, float]:
        assert self.width is not None
        assert self.height is not None
        across = _share(x, self.x, self.x_log)
        return self.left + across * self.width, self.top + (1 - _share(y, self.y, self.log)) * self.height

    def frame(self, x_name: str, y_name: str, title: str = "") -> Axes:
        """Grid, ticks and names of the axes."""
        assert self.width is not None
        assert self.height is not None
        bottom = self.top + self.height
        values = self.y_ticks if self.y_ticks is not None else self._ticks(self.y, self.log)
        for value in values:
            _, y = self.at(self.x[0], value)
            self.canvas.line(self.left, y, self.left + self.width, y, "rule")
            self.canvas.text(self.left - 6, y + 4, written(value), anchor="end", style="muted")
        for value in self.x_ticks if self.x_ticks is not None else self._ticks(self.x, self.x_log):
            x, _ = self.at(value, self.y[0])
            self.canvas.line(x, bottom, x, bottom + 4, "rule")
            self.canvas.text(x, bottom + 17, self.names.get(value, written(value)), anchor="middle", style="muted")
        self.canvas.line(self.left, bottom, self.left + self.width, bottom, "edge")
        self.canvas.text(self.left + self.width / 2, bottom + 35, x_name, anchor="middle")
        beside = max(width_of(written(value)) for value in values)
        self.canvas.vertical_text(self.left - beside - 14, self.top + self.height / 2, y_name)
        if title:
            self.canvas.text(self.left, self.top - 12, title, style="big")
        return self

    def curve(self, points: Points, colour: int, width: float = 1.8, style: str = "") -> None:
        self.canvas.curve([self.at(*point) for point in points], f"s{colour} {style}".strip(), width)

    def points(self, points: Points, colour: int, radius: float = 3) -> None:
        for point in points:
            self.canvas.point(*self.at(*point), f"p{colour}", radius)

    def bar(self, x: float, low: float, high: float, width: float, fill: str, title: str | None = None) -> None:
        """A bar around x, `width` in units of x."""
        left, top = self.at(x - width / 2, high)
        right, bottom = self.at(x + width / 2, low)
        self.canvas.rect(left, top, right - left, bottom - top, fill, title=title)

    def legend(
        self,
        names: Sequence[str],
        colours: Sequence[int] | None = None,
        *,
        x: float | None = None,
        y: float | None = None,
    ) -> None:
        """Names of curves under one another, in the upper right corner by default."""
        assert self.width is not None
        longest = max(width_of(name) for name in names)
        x = self.left + self.width - longest - 30 if x is None else x
        y = self.top + 12 if y is None else y
        for place, name in enumerate(names):
            colour = place if colours is None else colours[place]
            self.canvas.line(x, y + 16 * place - 4, x + 18, y + 16 * place - 4, f"s{colour}", 2.4)
            self.canvas.text(x + 24, y + 16 * place, name)

    @staticmethod
    def _ticks(limits: tuple[float, float], log: bool) -> list[float]:
        if not log:
            return ticks_of(*limits)
        low, high = (math.log10(limit) for limit in limits)
        return [10.0**power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def _share(value: float, limits: tuple[float, float], log: bool) -> float:
    low, high, value = (math.log10(v) for v in (*limits, value)) if log else (*limits, value)
    return (value - low) / ((high - low) or 1.0)


def heat(
    canvas: Canvas,
    x: float,
    y: float,
    cell: tuple[float, float],
    rows: Sequence[Sequence[float]],
    colour: int = 0,
    *,
    largest: float | None = None,
    numbers: bool = False,
    title: str = "",
) -> None:
    """A table of values as boxes, the darker the larger. cell: width and height of a box."""
    most = largest if largest is not None else max((max(row) for row in rows), default=1.0) or 1.0
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            place = x + column * cell[0], y + row * cell[1]
            canvas.rect(
                *place,
                *cell,
                f"p{colour}",
                opacity=min(value / most, 1.0),
                stroke="rule",
                title=f"{title}{written(value)}",
            )
            if numbers:
                canvas.text(
                    place[0] + cell[0] / 2, place[1] + cell[1] / 2 + 4, written(value), anchor="middle", style="small"
                )
