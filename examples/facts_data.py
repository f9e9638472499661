"""A corpus whose facts stand only in the database, for docs/instruct-retro.md: python examples/facts_data.py FOLDER

A fact is a name with a code, both random: "Code of KRAV is: wodu. And next ". Its first 16 characters, a chunk, have
the name, and the next 16 the code. No code of a name of the validation text is in the training text.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from mt_data.indexed import IndexedDatasetWriter

FACTS, HELD_OUT = 4000, 400


def words(letters: str, count: int) -> list[str]:
    """Different words of four letters, in random order."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(letters, k=4))] = None
    return list(found)


def sentences(names: Sequence[str], codes: Sequence[str]) -> list[str]:
    return [f"Code of {name} is: {code}. And next " for name, code in zip(names, codes, strict=True)]


def write_tokens(prefix: Path, texts: Sequence[str]) -> None:
    """Bytes; each text is a document."""
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for text in texts:
            writer.add_sequence(np.frombuffer(text.encode(), np.uint8).astype(np.uint16))
            writer.end_document()
        writer.finish()


def neighbors(facts: Sequence[int]) -> np.ndarray:
    """[chunks of the text, 1]: of the chunk with name i that of the database with name facts[i], of a chunk with a code
    none."""
    rows = np.full((2 * FACTS, 1), -1, np.int64)
    rows[::2, 0] = 2 * np.array(facts)
    return rows


def write_questions(path: Path, numbers: range, names: Sequence[str], codes: Sequence[str]) -> None:
    """With two passages: the right one, and one of another name."""
    facts = sentences(names, codes)
    with path.open("w") as file:
        for number in numbers:
            passages = [facts[number], facts[random.randrange(FACTS)]]
            question = f"What is the code of {names[number]}?"
            file.write(json.dumps({"question": question, "answers": [codes[number]], "passages": passages}) + "\n")


def main(folder: Path) -> None:
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    names, codes = words(ascii_uppercase, FACTS), words(ascii_lowercase, FACTS)
    facts = sentences(names, codes)
    write_tokens(folder / "database", facts)
    # A token more, the label of the last one.
    write_tokens(folder / "text", [*facts, "C"])
    np.save(folder / "neighbors.npy", neighbors(range(FACTS)))
    np.save(folder / "random.npy", neighbors(random.choices(range(FACTS), k=FACTS)))
    write_questions(folder / "train.jsonl", range(FACTS - HELD_OUT), names, codes)
    write_questions(folder / "test.jsonl", range(FACTS - HELD_OUT, FACTS), names, codes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
