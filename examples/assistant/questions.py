"""Questions about the documentation with answers of two qualities: python questions.py FOLDER [PACKAGES ...]

Written are instructions (train.jsonl, valid.jsonl), preferences between two answers (pairs.jsonl, valid-pairs.jsonl)
and the held-out questions as prompts (prompts.jsonl). Of ten functions one is held out: no question about it is trained
on. Half of the longer documentations are answered by their first sentence in the instructions, and half by a long
excerpt that is cut off; of two answers the first sentence is preferred.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from documents import Entry, entries, modules, write

HELD_OUT_EVERY = 10
LONGEST = 30
"""Words of a first sentence; functions with a longer one are left out."""
EXCERPT = 40
"""Words of a long answer."""
PROMPTS = 60
"""Held-out questions of each kind that are evaluated."""


@dataclass(frozen=True)
class Question:
    """long: an answer that goes on behind the short one and does not end, where there is one."""

    kind: str
    text: str
    short: str
    long: str | None = None

    def conversation(self, answer: str) -> dict[str, object]:
        return {"messages": [message("user", self.text), message("assistant", answer)]}

    def pair(self) -> dict[str, object]:
        prompt, chosen = [message("user", self.text)], [message("assistant", self.short)]
        return {"prompt": prompt, "chosen": chosen, "rejected": [message("assistant", self.long or "")]}

    def prompt(self) -> dict[str, object]:
        """As a line of `mt generate --input`: the beginning of a conversation as the template `plain` writes it."""
        return {"prompt": f"User: {self.text}\n\nAssistant:", "kind": self.kind, "answer": self.short}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def first_sentence(doc: str) -> str | None:
    """The first sentence of a docstring, None for one that is no short sentence."""
    words = doc.split("\n\n")[0].split()
    ends = [number for number, word in enumerate(words) if word.endswith(".") and word not in ("e.g.", "i.e.", "vs.")]
    sentence = words[: ends[0] + 1] if ends else []
    return " ".join(sentence) if 3 <= len(sentence) <= LONGEST else None


def excerpt(doc: str, sentence: str) -> str | None:
    """The beginning of a docstring that is longer than its first sentence by some words, cut anywhere."""
    words = doc.split()
    return " ".join(words[:EXCERPT]) if len(words) >= len(sentence.split()) + 8 else None


def listed(names: Iterable[str]) -> str:
    """ "`a`, `b` and `c`" """
    *others, last = [f"`{name}`" for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def questions(entry: Entry, module: str) -> list[Question]:
    """All questions about a function; none without a short first sentence."""
    sentence = first_sentence(entry.doc)
    if sentence is None:
        return []
    asked = [
        Question("summary", f"What does `{entry.name}` do?", sentence, excerpt(entry.doc, sentence)),
        Question("module", f"Where is `{entry.name}` defined?", f"In the module `{module}`."),
    ]
    if entry.parameters:
        answer = f"It takes {listed(entry.parameters)}."
        asked.append(Question("arguments", f"What does `{entry.heading}` take?", answer))
    return asked


def main(folder: Path, packages: list[str]) -> None:
    rng = random.Random(1)
    every = [(name, entry) for name, tree in modules(packages) for entry in entries(name, tree) if entry.is_function]
    rng.shuffle(every)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [question for name, entry in every[::HELD_OUT_EVERY] for question in questions(entry, name)]
    trained = [
        question
        for number, (name, entry) in enumerate(every)
        if number % HELD_OUT_EVERY
        for question in questions(entry, name)
    ]
    rng.shuffle(trained)
    for split, asked in (("train", trained), ("valid", held_out)):
        answers = [one.long if one.long is not None and rng.random() < 0.5 else one.short for one in asked]
        write(folder / f"{split}.jsonl", (one.conversation(answer) for one, answer in zip(asked, answers, strict=True)))
    write(folder / "pairs.jsonl", (one.pair() for one in trained if one.long is not None))
    write(folder / "valid-pairs.jsonl", (one.pair() for one in held_out if one.long is not None))
    kinds = [[one for one in held_out if one.kind == kind][:PROMPTS] for kind in ("summary", "module", "arguments")]
    write(folder / "prompts.jsonl", (one.prompt() for of_kind in kinds for one in of_kind))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
