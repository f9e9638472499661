"""The site's navigation has every page once, and the pages name every section of the configuration."""

from __future__ import annotations

import re
from collections import Counter

from tests.docs.blocks import ROOT

from mt_core.config.sections import section_types
from mt_core.plugins import load_plugins

NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def test_every_page_stands_in_the_navigation_once() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert Counter(re.findall(r"- (\S+\.md)$", NAVIGATION, re.MULTILINE)) == Counter(pages)


def test_no_heading_stands_in_the_navigation_twice() -> None:
    headings = re.findall(r"^ *- ([^:\n]+):$", NAVIGATION, re.MULTILINE)
    assert [name for name, count in Counter(headings).items() if count > 1] == []


def test_the_page_on_configuration_lists_every_section() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = text.partition("| section |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(section_types(load_plugins()))


def test_the_glossary_is_long_and_names_what_others_say() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    terms = [row.split("|")[1].strip() for row in rows if not row.startswith(("| term", "| ---"))]
    assert len(terms) >= 80
    assert [term for term, count in Counter(terms).items() if count > 1] == []
    assert all(sum(f"{letter}: " in row for row in rows) >= 15 for letter in "MTH")
