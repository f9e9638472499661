"""Writes figures into docs/figures: python -m scripts.figures [NAME ...]."""

from __future__ import annotations

import sys

from scripts.figures.registry import FOLDER, load_figures


def main(names: list[str]) -> None:
    figures = load_figures()
    unknown = [name for name in names if name not in figures]
    if unknown:
        raise SystemExit(f"no figure is named {', '.join(unknown)}; there are {', '.join(figures)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names or figures:
        (FOLDER / f"{name}.svg").write_text(figures[name]().to_svg(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
