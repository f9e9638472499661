"""Writes the cards into the pages of families, and the table of all: python -m scripts.model_cards."""

from __future__ import annotations

from scripts.model_cards.results import BEGIN, END, PAGES, card, page_of, read, table

from mt_core.plugins import load_plugins

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


def pages() -> dict[str, str]:
    results, host = read(), load_plugins()
    cards: dict[str, list[str]] = {}
    for family, result in results.items():
        cards.setdefault(page_of(family), []).append(card(family, result))
    written = {page: page_text(page, found) for page, found in cards.items() if (PAGES / f"{page}.md").exists()}
    return {**written, "index": INDEX_HEAD + table(host, results)}


if __name__ == "__main__":
    for page, text in pages().items():
        (PAGES / f"{page}.md").write_text(text, encoding="utf-8")
