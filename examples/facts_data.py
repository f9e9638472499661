"""A corpus whose facts stand only in a database, for docs/guides/retro.md: python examples/facts_data.py FOLDER

A fact is a name with a code, both random: "Code of KRAV is: wodu. And next " in the text, and in the database "Entry of
KRAV in the list: wodu.". The first 16 characters of each, a chunk, have the name, and the next 16 the code. No name or
code of the last tenth, which is for validation, is in the rest of the text.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

FACTS, HELD_OUT = 4000, 400


def words(letters: str, count: int) -> list[str]:
    """Different words of four letters, in random order."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(letters, k=4))] = None
    return list(found)


def write_lines(path: Path, records: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def questions(
    numbers: range, names: Sequence[str], codes: Sequence[str], entries: Sequence[str]
) -> Iterator[dict[str, object]]:
    """With two passages: the right one, and one of another name."""
    for number in numbers:
        passages = [entries[number], random.choice(entries)]
        yield {"question": f"What is the code of {names[number]}?", "answers": [codes[number]], "passages": passages}


def main(folder: Path) -> None:
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    names, codes = words(ascii_uppercase, FACTS), words(ascii_lowercase, FACTS)
    facts = list(zip(names, codes, strict=True))
    entries = [f"Entry of {name} in the list: {code}." for name, code in facts]
    sentences = [f"Code of {name} is: {code}. And next " for name, code in facts]
    write_lines(folder / "database.jsonl", ({"text": entry} for entry in entries))
    write_lines(folder / "corpus.jsonl", ({"text": sentence} for sentence in sentences))
    write_lines(folder / "train.jsonl", questions(range(FACTS - HELD_OUT), names, codes, entries))
    write_lines(folder / "test.jsonl", questions(range(FACTS - HELD_OUT, FACTS), names, codes, entries))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
