"""Cards and tables of model families: what their generator writes, of every family there is."""

from __future__ import annotations

import re

import pytest
from scripts.model_cards.__main__ import FIRST_PAGE, pages
from scripts.model_cards.results import PAGES, read, short_table

from mt_core.config.sources import installed_presets
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import MODELS

WITHOUT_PAGE = {"module"}
"""A module of the user's own."""
WITHOUT_CARD = {"gpt_multiple_choice", "llama_multiple_choice"}
"""Heads without a class in transformers, on the layers of families that have cards."""


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


@pytest.mark.slow
def test_pages_are_what_the_generator_writes() -> None:
    different = [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    assert not different, "run: uv run python -m scripts.model_cards"


def test_every_family_is_on_the_first_page_with_its_presets_and_formats(host: PluginHost) -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(models/\w+\.md\) \|.*$", FIRST_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*rows, *WITHOUT_PAGE]) == sorted(spec.name for spec in host[MODELS])
    numbers = dict(re.findall(r"\[(\w+)\]\(\S+\) \| [^|]+ \| (\d+) \|", short_table(host)))
    families = [preset.family for named in installed_presets(host)[0].values() for preset in named]
    assert {name: int(number) for name, number in numbers.items()} == {name: families.count(name) for name in rows}


def test_every_family_has_a_card_without_a_difference(host: PluginHost) -> None:
    results = read()
    assert {spec.name for spec in host[MODELS]} == {*results, *WITHOUT_PAGE, *WITHOUT_CARD}
    cases = [case for result in results.values() for case in result["cases"].values()]
    assert all(case["weights"] and case.get("greedy", True) for case in cases)
    # An error of more than rounding is one of fp32: transformers has it too.
    assert all(case["outputs"] < 1e-5 and case["loss"] < 1e-5 for case in cases)
    for case in cases:
        assert case["gradients"] < 1e-5 or case["fp64"]["mt"] < 2 * case["fp64"]["transformers"]
    assert all((PAGES / f"{page}.md").exists() for page in ("index", "llama"))
