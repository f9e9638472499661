"""Figures by name: each is a function without arguments that returns the text of an SVG file."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts.figures
from scripts.figures.svg import Canvas

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "docs" / "figures"
DATA = HERE / "data"
"""Results of runs, as `record` writes them."""
FIGURES: dict[str, Callable[[], Canvas]] = {}


def figure(name: str) -> Callable[[Callable[[], Canvas]], Callable[[], Canvas]]:
    """Registers a function as docs/figures/NAME.svg."""

    def register(draw: Callable[[], Canvas]) -> Callable[[], Canvas]:
        assert name not in FIGURES, f"two figures are named {name}"
        FIGURES[name] = draw
        return draw

    return register


def load_figures() -> dict[str, Callable[[], Canvas]]:
    """All figures; imports the modules that draw."""
    for module in pkgutil.iter_modules(scripts.figures.__path__):
        if module.name.startswith("draw_"):
            importlib.import_module(f"scripts.figures.{module.name}")
    return dict(sorted(FIGURES.items()))


def recorded(name: str) -> Any:
    """What a run has left in data/NAME.json."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
