"""Canvas that collects shapes and writes an SVG file, whose colours follow `prefers-color-scheme`.

Colours are names of the palette: `c0` to `c7` for what differs in kind, `grey` for what is inactive. An area is filled
with the soft shade of its colour, on which text can be read in both schemes; lines and points have the strong shade.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

SOFT_LIGHT = ("#a9cdea", "#f3c08a", "#a8d5a2", "#d9b8e8", "#f2a9a2", "#9fdcd8", "#e9dc8b", "#c9c2b4")
SOFT_DARK = ("#24547d", "#7d4e17", "#2c6127", "#5f3a75", "#7c2f29", "#1d605c", "#66591a", "#55504a")
STRONG_LIGHT = ("#1f6fb2", "#c96a00", "#2e8b2e", "#8a45b0", "#c8372d", "#0f8f88", "#9a8200", "#7a7064")
STRONG_DARK = ("#6fb7f2", "#f5a54a", "#77cf70", "#cf9cec", "#f58b83", "#5fd4cc", "#e0cf5a", "#bdb3a6")
FONT_SIZE = 12
CHARACTER_WIDTH = 0.57
"""Mean width of a character of a sans-serif font, in font sizes."""


def _scheme(soft: Sequence[str], strong: Sequence[str], text: str, muted: str, rule: str, grey: str) -> str:
    rules = [f".c{n}{{fill:{colour}}}" for n, colour in enumerate(soft)]
    rules += [f".s{n}{{stroke:{colour}}} .p{n}{{fill:{colour}}}" for n, colour in enumerate(strong)]
    rules += [f"text{{fill:{text}}} .muted{{fill:{muted}}} .rule{{stroke:{rule}}} .edge{{stroke:{text}}}"]
    rules += [f".grey{{fill:{grey}}} .ink{{fill:{text}}} .none{{fill:none}}"]
    return "\n".join(rules)


STYLE = "\n".join(
    [
        f"text{{font:{FONT_SIZE}px sans-serif}} .small{{font-size:10px}} .big{{font-size:14px;font-weight:600}}",
        ".mono{font-family:monospace} .dash{stroke-dasharray:4 3} line,path,polyline{fill:none}",
        _scheme(SOFT_LIGHT, STRONG_LIGHT, "#222", "#666", "#d5d5d5", "#ececec"),
        "@media (prefers-color-scheme: dark){",
        _scheme(SOFT_DARK, STRONG_DARK, "#e8e8e8", "#a6a6a6", "#4a4a4a", "#3a3a3e"),
        "}",
    ]
)


def width_of(words: str, size: float = FONT_SIZE) -> float:
    """Approximate width of a text in pixels."""
    return len(words) * size * CHARACTER_WIDTH


class Canvas:
    """Shapes in pixels; (0, 0) is the upper left corner."""

    def __init__(self, width: float, height: float, description: str) -> None:
        """description: what the drawing shows, for screen readers."""
        self.width, self.height, self.description = width, height, description
        self._shapes: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        *,
        stroke: str | None = None,
        opacity: float | None = None,
        radius: float = 0,
        title: str | None = None,
    ) -> None:
        """fill: c0 to c7, p0 to p7, grey or none; stroke: s0 to s7, rule or edge; title: shown by the mouse."""
        classes = " ".join(filter(None, (fill, stroke)))
        shade = f' fill-opacity="{opacity:.3g}"' if opacity is not None else ""
        corner = f' rx="{_number(radius)}"' if radius else ""
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        start = f'<rect class="{classes}" {place}{shade}{corner}'
        self._shapes.append(f"{start}><title>{escape(title)}</title></rect>" if title else f"{start}/>")

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> None:
        """anchor: start, middle or end; style: muted, small, big, mono, or several of them; p0 to p7 for a colour."""
        attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
        attributes += f' class="{style}"' if style else ""
        self._shapes.append(f'<text x="{_number(x)}" y="{_number(y)}"{attributes}>{escape(words)}</text>')

    def vertical_text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Text that runs upwards and is centred at (x, y)."""
        self._shapes.append(
            f'<text transform="translate({_number(x)} {_number(y)}) rotate(-90)" text-anchor="middle" '
            f'class="{style}">{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "edge", width: float = 1) -> None:
        place = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        self._shapes.append(f'<line class="{stroke}" {place} stroke-width="{_number(width)}"/>')

    def curve(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1.8) -> None:
        joined = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._shapes.append(f'<polyline class="{stroke}" points="{joined}" stroke-width="{_number(width)}"/>')

    def point(self, x: float, y: float, fill: str, radius: float = 3) -> None:
        self._shapes.append(f'<circle class="{fill}" cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "edge", width: float = 1.2) -> None:
        """A line with a head at its second end."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
        along, across = ((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length)
        self.line(x1, y1, x2, y2, stroke, width)
        ends = [(x2 - 7 * along[0] + side * across[0], y2 - 7 * along[1] + side * across[1]) for side in (3.5, -3.5)]
        self.curve([ends[0], (x2, y2), ends[1]], stroke.replace(" dash", "").replace("dash ", ""), width)

    def cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        fill: str = "none",
        *,
        stroke: str = "rule",
        style: str = "",
        title: str | None = None,
    ) -> None:
        """A box with a centred text."""
        self.rect(x, y, width, height, fill, stroke=stroke, title=title)
        if words:
            self.text(x + width / 2, y + height / 2 + 4, words, anchor="middle", style=style)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], gap: float = 18) -> float:
        """(fill, name) in a row; returns where the row ends."""
        for fill, name in entries:
            self.rect(x, y - 10, 12, 12, fill, stroke="rule")
            self.text(x + 17, y, name)
            x += 17 + width_of(name) + gap
        return x

    def to_svg(self) -> str:
        size = f'width="{_number(self.width)}" height="{_number(self.height)}"'
        box = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">'
        return "\n".join(
            [
                start,
                f"<title>{escape(self.description)}</title>",
                f"<style>{STYLE}</style>",
                *self._shapes,
                "</svg>",
                "",
            ]
        )


def _number(value: float) -> str:
    """At most one decimal: the same text on every machine."""
    return (
        f"{value + 0.0:.1f}".removesuffix(".0").replace("-0", "0")
        if abs(value) < 0.05
        else f"{value:.1f}".removesuffix(".0")
    )
