"""Links between pages lead somewhere: to a file that is there, and to a heading that it has. Nothing is fetched."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from tests.docs.blocks import FENCE, ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "packages").glob("*/*.md"),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HTML_LINK = re.compile(r"(?:href|src)=\"([^\"]+)\"")


@cache
def prose(page: Path) -> str:
    """The text without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives headings: lower case, spaces as hyphens, punctuation dropped, -1 for a second."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while (numbered := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(numbered)
    return found


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)) + HTML_LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(prose(page))
        if not re.match(r"[a-z]+:", link)
    }
    folders = {path for path in linked if path.is_dir()}
    lost = [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.resolve() not in linked and not any(page.is_relative_to(folder) for folder in folders)
    ]
    assert lost == []
