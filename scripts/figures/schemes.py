"""A dark scheme for pictures that commands draw in light colours: python -m scripts.figures.schemes [FILE ...].

A page shows what its command has written, with a style behind it that takes other colours where the reader's scheme is
dark: rules of a style come before the attributes of a shape. Without files, all pictures of `docs` that have none.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
DARK = {
    "white": "#1e2129",
    # Lines of axes and frames, idle times.
    "#e4e7ea": "#3d424b",
    "#ddd": "#3d424b",
    "#999": "#7b818b",
    "#e9e9ec": "#3a3a3e",
    # Texts.
    "#333": "#e0e0e0",
    # Areas with texts on them.
    "#8fb8de": "#24547d",
    "#e3a35f": "#7d4e17",
    "#e8bd6d": "#66591a",
    "#9cc08b": "#2c6127",
    # Curves.
    "#3b7dd8": "#6fb7f2",
    "#d9731a": "#f5a54a",
    "#2f9e63": "#77cf70",
    "#a557c4": "#cf9cec",
    "#0b6e99": "#6fb7f2",
    "#c4561a": "#f5a54a",
    "#4d8b31": "#77cf70",
}
"""Colour of `mt plot`, `mt train --picture`, `--trace-schedule` and the examples' plots -> the one on a dark page."""
TEXT = "#e8e8e8"
SCHEME = "prefers-color-scheme: dark"


def with_dark_scheme(svg: str) -> str:
    """The picture with the style, if it has none."""
    if SCHEME in svg:
        return svg
    end = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:end]}\n<style>@media ({SCHEME}){{\n{dark_rules()}\n}}</style>{svg[end:]}"


def dark_rules() -> str:
    turned = [f'[{kind}="{light}"]{{{kind}:{dark}}}' for light, dark in DARK.items() for kind in ("fill", "stroke")]
    return "\n".join([f"text:not([fill]){{fill:{TEXT}}}", *turned])


def main(files: list[str]) -> None:
    for path in map(Path, files) if files else sorted(DOCS.rglob("*.svg")):
        path.write_text(with_dark_scheme(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
