"""Records of preferences about synthetic instructions, for a first run without data of one's own: of two right answers
the one that ends with a full stop is preferred."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mt_core.interfaces import Split
from mt_data.datasets.sft.instructions import instruction_and_answer

FOLDER = Path("runs") / "example-data"
TRAINED, HELD_OUT = 1000, 100
"""Instructions with words of the training set of the preset instructions-tiny, and with those of its validation set."""
Record = dict[str, Any]


def pairs(question: str, answer: str) -> list[Record]:
    """Records as mt tune dpo and orpo take them."""
    return [{"prompt": _message("user", question), "chosen": _spoken(f"{answer}."), "rejected": _spoken(answer)}]


def single_answers(question: str, answer: str) -> list[Record]:
    """The same as two records of mt tune kto."""
    texts = ((f"{answer}.", True), (answer, False))
    return [
        {"prompt": _message("user", question), "completion": _spoken(text), "label": label} for text, label in texts
    ]


def write_example_records(name: str, folder: Path = FOLDER) -> tuple[Path, Path]:
    """Files to train and to evaluate on; the same in every call. name: a data set of preferences."""
    records_of = RECORDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[Split, int], ...] = (("train", TRAINED), ("valid", HELD_OUT))
    train, valid = (folder / f"{name}-{split}.jsonl" for split, _ in splits)
    for path, (split, count) in zip((train, valid), splits, strict=True):
        lines = [json.dumps(record) + "\n" for record in _records(records_of, split, count)]
        path.write_text("".join(lines), encoding="utf-8")
    return train, valid


def _records(records_of: Callable[[str, str], list[Record]], split: Split, count: int) -> Iterator[Record]:
    rng = random.Random(f"preferences {split}")
    for _ in range(count):
        yield from records_of(*instruction_and_answer(rng, split))


def _message(role: str, content: str) -> list[Record]:
    return [{"role": role, "content": content}]


def _spoken(answer: str) -> list[Record]:
    return _message("assistant", answer)


RECORDS = {"preference": pairs, "unpaired_preference": single_answers}
"""Data set -> the records of an instruction and its answer."""
