"""Drawings of the documentation: each is what its code draws today, follows the reader's scheme, and stands on a page.

`python -m scripts.figures` writes them again after a change; `python -m scripts.figures.record` runs what some show.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from scripts.figures.registry import FOLDER, load_figures
from scripts.figures.schemes import DARK, DOCS, SCHEME, dark_rules
from tests.docs.blocks import PAGES, ROOT

OF_COMMANDS = {
    "assistant-loss": "mt plot",
    "layout-gpt-3d": "mt train --picture",
    "layout-llama-cp": "mt train --picture",
    "layout-mixtral-ep": "mt train --picture",
    "moe-load": "mt moe plot",
    "multimodal-loss": "examples/plot_validation.py",
    "preferences-loss": "mt plot",
    "retriever-recall": "examples/plot_recall.py",
    "retro-loss": "examples/plot_validation.py",
    "schedule-gpt-3d": "mt train --trace-schedule",
}
"""Pictures that a page's own commands write."""
FILES = sorted(path.stem for path in FOLDER.glob("*.svg"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(load_figures()))
def test_a_figure_is_what_its_code_draws(name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert load_figures()[name]().to_svg() == text, f"run: uv run python -m scripts.figures {name}"


def test_every_picture_has_its_code() -> None:
    assert sorted({*load_figures(), *OF_COMMANDS}) == FILES
    assert len(load_figures()) >= 40


@pytest.mark.parametrize("name", [name for name in FILES if name not in OF_COMMANDS])
def test_a_figure_says_what_it_shows_and_has_two_schemes(name: str) -> None:
    tree = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    title = tree.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert len(title.text or "") > 20
    style = tree.find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_follows_the_scheme_of_the_page(path: Path) -> None:
    """Those that commands draw in light colours have another for each of them."""
    text = path.read_text(encoding="utf-8")
    assert SCHEME in text, f"run: uv run python -m scripts.figures.schemes {path}"
    if "<style>@media" in text and path.stem != "moe-load":  # whose shades are values
        shapes = text.partition("</style>")[2]
        assert {colour for _, colour in re.findall(r'(fill|stroke)="([^"]+)"', shapes)} <= DARK.keys() | {"none"}
        assert dark_rules() in text, "run: uv run python -m scripts.figures.schemes on a new picture of the command"


def test_every_picture_stands_on_a_page_with_a_text_that_replaces_it() -> None:
    shown: dict[str, str] = {}
    for page in PAGES:
        for text, name in re.findall(r"!\[([^\]]*)\]\([^)]*figures/([\w-]+)\.svg\)", page.read_text(encoding="utf-8")):
            shown[name] = text
        for tag in re.findall(r"<img [^>]*>", page.read_text(encoding="utf-8")):
            if found := re.search(r"figures/([\w-]+)\.svg", tag):
                shown[found[1]] = (re.search(r'alt="([^"]*)"', tag) or ["", ""])[1]
    assert sorted(set(FILES) - shown.keys()) == []
    assert [name for name, text in shown.items() if len(text) < 15] == []
    assert ROOT.joinpath("README.md").read_text(encoding="utf-8").count("docs/figures/") >= 2
