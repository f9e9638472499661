"""A small world in which retrieval can be learned: a passage has words, a question some of them.

Words are shared by all passages, so that what is learned from some passages holds for others.
"""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path

WORDS = [f"{first}{second}" for first in ("ka", "lo", "mi", "nu", "pe", "ro", "su", "ti") for second in "bdfgklmn"]
PASSAGES, TRAINED = 240, 180
"""Questions for training are about the first TRAINED passages, those for evaluation about the others."""


@dataclass(frozen=True)
class World:
    """files: vocab.txt, passages.tsv, train.json, dev.json, questions.tsv."""

    folder: Path
    titles: list[str]
    texts: list[str]

    @property
    def passages(self) -> Path:
        return self.folder / "passages.tsv"


def write_world(folder: Path) -> World:
    draw = random.Random(7)
    rows = [draw.sample(WORDS, 5) for _ in range(PASSAGES)]
    titles = [words[0] for words in rows]
    texts = [f"{' '.join(words[1:])} is number {number}." for number, words in enumerate(rows)]
    world = World(folder, titles, texts)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS, "is", "number", "."]) + "\n")
    write_passages(world.passages, titles, texts)
    questions = [(number, " ".join(draw.sample(rows[number], 4)) + "?") for number in range(PASSAGES)]
    for name, chosen in (("train", questions[:TRAINED]), ("dev", questions[TRAINED:])):
        records = [_record(world, number, question, draw) for number, question in chosen]
        (folder / f"{name}.json").write_text(json.dumps(records))
    lines = [f'{question[:-1]}\t["number {number}"]' for number, question in questions[TRAINED:]]
    (folder / "questions.tsv").write_text("\n".join(lines) + "\n")
    return world


def write_passages(path: Path, titles: list[str], texts: list[str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["id", "text", "title"])
        writer.writerows([number + 1000, text, titles[number]] for number, text in enumerate(texts))


def _record(world: World, number: int, question: str, draw: random.Random) -> dict:
    """With two negatives that are not hard; three for passage 0, so that others have fewer than the most."""
    hard, *others = draw.sample([row for row in range(PASSAGES) if row != number], 4)
    return {
        "question": question,
        "answers": [f"number {number}"],
        "positive_ctxs": [_context(world, number)],
        "hard_negative_ctxs": [_context(world, hard)],
        "negative_ctxs": [_context(world, other) for other in others[: 3 if number == 0 else 2]],
    }


def _context(world: World, number: int) -> dict:
    return {"title": world.titles[number], "text": world.texts[number], "passage_id": str(number + 1000)}
