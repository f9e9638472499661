"""Every recipe in examples/ is a configuration that holds together."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_cli.main import run

RECIPES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 5


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(recipe: Path, capsys) -> None:
    assert run(["config", "validate", str(recipe)]) == 0
