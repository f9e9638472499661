"""The search of the site finds the answer to what users ask most among its first three hits.

Here on an index of the Markdown files; `.ci/run` does the same on that of the built site, with the Python reference.
"""

from __future__ import annotations

import json

import pytest
from tests.docs.blocks import ROOT
from tests.docs.site_search import CASES, SEPARATOR, SiteSearch, markdown_entries, misses


@pytest.mark.slow
def test_frequent_questions_find_their_answers() -> None:
    search = SiteSearch(markdown_entries(ROOT / "docs"))
    assert len(json.loads(CASES.read_text(encoding="utf-8"))) >= 30
    assert misses(search) == []
    # A search that finds everything would prove nothing.
    assert search.hits("zebra crossing") == []


def test_answers_are_pages_and_sections_that_exist() -> None:
    locations = {entry.location for entry in markdown_entries(ROOT / "docs")}
    answers = {answer for found in json.loads(CASES.read_text(encoding="utf-8")).values() for answer in found}
    assert sorted(answers - locations) == []


def test_words_are_separated_as_on_the_site() -> None:
    assert f"separator: '{SEPARATOR.pattern}'" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
