"""Writes the cards into the pages of families, and the tables of all: python -m scripts.model_cards."""

from __future__ import annotations

from pathlib import Path

from scripts.model_cards.results import BEGIN, END, PAGES, card, page_of, read, short_table, table

from mt_core.plugins import load_plugins

FIRST_PAGE = PAGES.parent / "index.md"
TABLE, END_OF_TABLE = "<!-- table: python -m scripts.model_cards -->", "<!-- end of table -->"
INDEX_HEAD = """# Models

Every family of models, and what it was compared with. `mt models check DIR` says whether a published model is taken,
`mt models` lists presets. The page of a family has its card: what was compared with what, the largest errors and the
layouts.

"""


def page_text(page: str, cards: list[str]) -> str:
    """The page with its cards in place of the old ones, at its end."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    if BEGIN in text:
        text = text[: text.index(BEGIN)] + text[text.rindex(END) + len(END) :]
    return text.rstrip() + "\n\n" + "\n".join(cards)


def pages() -> dict[Path, str]:
    """The whole text of each page that has something generated."""
    results, host = read(), load_plugins()
    cards: dict[str, list[str]] = {}
    for family, result in results.items():
        cards.setdefault(page_of(family), []).append(card(family, result))
    written = {PAGES / f"{page}.md": page_text(page, found) for page, found in cards.items()}
    first = FIRST_PAGE.read_text(encoding="utf-8")
    before, behind = first.partition(TABLE)[0], first.partition(END_OF_TABLE)[2]
    short = f"{before}{TABLE}\n{short_table(host)}{END_OF_TABLE}{behind}"
    return {**written, PAGES / "index.md": INDEX_HEAD + table(host, results), FIRST_PAGE: short}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
