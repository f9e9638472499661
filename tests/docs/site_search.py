"""Search of the documentation as its site does it: python -m tests.docs.site_search SITE [QUERY ...].

The site (Material for MkDocs) searches in the browser with lunr. Its index has one document for each page and one for
each heading, with the fields title (boost 1000) and text (boost 1), BM25 without normalization by length (b = 0), and
stop words left out. A query's words match as prefixes. The score of a document is multiplied by 1 + boost squared,
where boost counts whether it is a page, and whether all words were found; documents of one page are shown as one hit.
lunr for Python computes nearly the same order here (its expansion of prefixes differs from that of the browser's
version), on the site's own `search_index.json`, or on an index of the Markdown files with the same division.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lunr.builder import Builder
from lunr.query import Query, QueryPresence
from lunr.stop_word_filter import WORDS, stop_word_filter

SEPARATOR = re.compile(r"""[\s\-_,:!=\[\]()"`/.;?]+""")
"""That of mkdocs.yml."""
HITS = 3
CASES = Path(__file__).with_name("search_questions.json")


@dataclass(frozen=True)
class Entry:
    """A page (no # in its location) or a section of one."""

    location: str
    title: str
    text: str

    @property
    def page(self) -> str:
        return self.location.partition("#")[0]


def words_of(text: str) -> list[str]:
    return [word for word in SEPARATOR.split(text.lower()) if word]


class SiteSearch:
    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = {entry.location: entry for entry in entries}

    @cached_property
    def index(self):  # type: ignore[no-untyped-def]
        builder = Builder()
        builder.pipeline.add(stop_word_filter)
        builder.search_pipeline.add(stop_word_filter)
        builder.ref("location")
        builder.field("title", boost=1000)
        builder.field("text", boost=1)
        builder.b(0)
        for entry in self.entries.values():
            # Words that are separated as on the site, for lunr's tokenizer, which separates at spaces and hyphens.
            fields = {"title": " ".join(words_of(entry.title)), "text": " ".join(words_of(entry.text))}
            builder.add({"location": entry.location, **fields})
        return builder.build()

    def hits(self, query: str) -> list[str]:
        """The best section of each page, in the order in which the site shows the pages."""
        terms = words_of(query)
        searched = Query(self.index.fields)
        for term in terms:
            searched.term(term, wildcard=Query.WILDCARD_TRAILING, presence=QueryPresence.OPTIONAL)
        wanted = [term for term in terms if term not in WORDS]
        found = []
        for match in self.index.query(searched):
            entry = self.entries[match["ref"]]
            seen = match["match_data"].metadata
            every = all(any(word.startswith(term) for word in seen) for term in wanted)
            boost = (entry.location == entry.page) + every
            found.append((match["score"] * (1 + boost**2), entry))
        best: dict[str, str] = {}
        for _, entry in sorted(found, key=lambda hit: -hit[0]):
            best.setdefault(entry.page, entry.location)
        return list(best.values())


def site_entries(site: Path) -> list[Entry]:
    """Of a built site."""
    docs = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    return [Entry(doc["location"], doc["title"], re.sub(r"<[^>]+>", " ", doc["text"])) for doc in docs]


def markdown_entries(folder: Path) -> list[Entry]:
    """Of Markdown files: a page with the text before its first section, and its sections."""
    found = []
    for path in sorted(folder.rglob("*.md")):
        page = f"{path.relative_to(folder).with_suffix('')}/".replace("index/", "")
        fence, title, text, location = False, "", [], page
        for line in path.read_text(encoding="utf-8").splitlines():
            fence ^= line.startswith("```")
            if (heading := re.match(r"#{1,6} (.+)", line)) and not fence:
                if title:
                    found.append(Entry(location, title, "\n".join(text)))
                anchor = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
                location = page if line.startswith("# ") else f"{page}#{anchor}"
                title, text = re.sub(r"[`*]", "", heading[1]), []
            else:
                text.append(line)
        found.append(Entry(location, title, "\n".join(text)))
    return found


def misses(search: SiteSearch) -> list[str]:
    """Questions whose answer is not among the first hits. An answer is a page, or a section of one."""
    found = []
    for query, answers in json.loads(CASES.read_text(encoding="utf-8")).items():
        first = search.hits(query)[:HITS]
        if not any(hit.startswith(answer) for hit in first for answer in answers):
            found.append(f"{query}: {', '.join(first)} and none of {', '.join(answers)}")
    return found


def main(site: str, *queries: str) -> None:
    search = SiteSearch(site_entries(Path(site)))
    for query in queries:
        print(f"{query}: {', '.join(search.hits(query)[:HITS])}")
    if not queries and (missed := misses(search)):
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main(*sys.argv[1:])
