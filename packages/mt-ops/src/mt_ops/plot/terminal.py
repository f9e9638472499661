"""A picture as text for a terminal: curves of braille dots, two by four in a character."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mt_ops.plot.curves import Curve, Picture, extremes
from mt_ops.plot.svg import Scale, limits, short

BLANK = 0x2800
"""The braille character without dots."""
BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""[row, column] of a dot in its character -> its bit."""
COLOURS = (34, 33, 32, 35, 36, 31)
"""Numbers of ANSI colours."""
EDGE = "\N{BOX DRAWINGS LIGHT VERTICAL}"
LEFT = 9
"""Characters of the labels at the left."""


def draw(picture: Picture, width: int, height: int) -> str:
    """Lines of `width` characters at most, `height` of them, with ANSI colours where there are several curves."""
    columns, rows = max(width - LEFT - 1, 8), max(height - 4, 3)
    x, y = _scales(picture, columns, rows)
    dots, owner = np.zeros((rows, columns), dtype=int), np.zeros((rows, columns), dtype=int)
    for place, curve in enumerate(picture.curves):
        _draw_curve(extremes(curve, 4 * columns), x, y, dots, owner, place)
    several = len(picture.curves) > 1
    body = [_line(dots[row], owner[row] if several else None) for row in range(rows)]
    labels = _row_labels(y, rows)
    return "\n".join(
        [
            f"{picture.y_label} over {picture.x_label}",
            *(
                f"{labels.get(row, ''):>{LEFT - 1}} \N{BOX DRAWINGS LIGHT VERTICAL}{line}"
                for row, line in enumerate(body)
            ),
            " " * LEFT + "\N{BOX DRAWINGS LIGHT UP AND RIGHT}" + "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * columns,
            " " * LEFT + _column_labels(x, columns),
            *([_legend(picture)] if several else []),
        ]
    )


def _scales(picture: Picture, columns: int, rows: int) -> tuple[Scale, Scale]:
    """To dots: columns from the left, rows from the top."""
    xs = np.concatenate([curve.x for curve in picture.curves])
    ys = np.concatenate([curve.y for curve in picture.curves])
    x = Scale(*limits(xs, picture.log_x, 0.0), 0, 2 * columns - 1, picture.log_x)
    return x, Scale(*limits(ys, picture.log_y, 0.02), 4 * rows - 1, 0, picture.log_y)


def _draw_curve(curve: Curve, x: Scale, y: Scale, dots: np.ndarray, owner: np.ndarray, place: int) -> None:
    if not len(curve.x):
        return
    across, down = x(curve.x), y(curve.y)
    at = [(across[:1], down[:1])]
    for (x0, y0), (x1, y1) in pairwise(zip(across, down, strict=True)):
        count = int(max(abs(x1 - x0), abs(y1 - y0))) + 2
        at.append((np.linspace(x0, x1, count), np.linspace(y0, y1, count)))
    i = np.clip(np.rint(np.concatenate([each[1] for each in at])).astype(int), 0, 4 * dots.shape[0] - 1)
    j = np.clip(np.rint(np.concatenate([each[0] for each in at])).astype(int), 0, 2 * dots.shape[1] - 1)
    np.bitwise_or.at(dots, (i // 4, j // 2), BITS[i % 4, j % 2])
    owner[i // 4, j // 2] = place


def _line(bits: np.ndarray, owner: np.ndarray | None) -> str:
    characters = [chr(BLANK + int(bit)) if bit else " " for bit in bits]
    if owner is None:
        return "".join(characters).rstrip()
    coloured = [
        f"\x1b[{COLOURS[place % len(COLOURS)]}m{character}\x1b[0m" if character != " " else character
        for character, place in zip(characters, owner, strict=True)
    ]
    return "".join(coloured).rstrip()


def _row_labels(y: Scale, rows: int) -> dict[int, str]:
    return {int(float(y(tick)) // 4): short(tick) for tick in y.ticks() if 0 <= float(y(tick)) < 4 * rows}


def _column_labels(x: Scale, columns: int) -> str:
    line = [" "] * (columns + LEFT)
    for tick in x.ticks():
        text, begin = short(tick), int(float(x(tick)) / 2) - len(short(tick)) // 2 + 1
        # The last one ends with the axis.
        begin = min(begin, columns + 1 - len(text))
        # A label that would touch the one before is left out.
        if begin >= 0 and all(character == " " for character in line[max(begin - 1, 0) : begin + len(text) + 1]):
            line[begin : begin + len(text)] = text
    return "".join(line[: columns + 1]).rstrip()


def _legend(picture: Picture) -> str:
    names = (
        f"\x1b[{COLOURS[place % len(COLOURS)]}m\N{BLACK SQUARE}\x1b[0m {curve.name}"
        for place, curve in enumerate(picture.curves)
    )
    return " " * LEFT + "  ".join(names)
