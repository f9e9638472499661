"""Data for docs/guides/retriever.md, from the documentation that the interpreter carries:

    python examples/retriever_data.py FOLDER

A passage is a function, class or method of the standard library whose docstring continues behind its first paragraph.
Its title is the module, its text the name, the signature and the rest of the docstring. The first paragraph is the
question, the name the answer.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

SKIPPED = re.compile(r"_|antigravity|this|idlelib|turtle|tkinter|test|nt|posix|msi|win|msvc")
FEWEST_WORDS, MOST_WORDS = 6, 80
HELD_OUT = 200
"""Questions for evaluation."""


class Entry(NamedTuple):
    title: str
    text: str
    question: str
    answer: str


def entries() -> Iterator[Entry]:
    """Each docstring once."""
    seen = set()
    for name, value in documented():
        question, _, rest = (inspect.getdoc(value) or "").partition("\n\n")
        words, asked = rest.split()[:MOST_WORDS], " ".join(question.split())
        if len(words) >= FEWEST_WORDS and len(asked.split()) >= 4 and asked not in seen:
            seen.add(asked)
            text = f"{name}{signature(value)}: {' '.join(words)}"
            yield Entry(name.partition(".")[0], text, asked.replace('"', "'"), name)


def documented() -> Iterator[tuple[str, Any]]:
    for module in modules():
        for name, value in members(module, module.__name__):
            yield name, value
            if inspect.isclass(value):
                yield from members(value, module.__name__, name)


def modules() -> Iterator[ModuleType]:
    for name in sorted(sys.stdlib_module_names):
        try:
            if not SKIPPED.match(name):
                yield importlib.import_module(name)
        except Exception:  # some need another system
            continue


def members(owner: Any, module: str, prefix: str | None = None) -> Iterator[tuple[str, Any]]:
    """Functions and classes that the owner defines itself."""
    for name, value in sorted(vars(owner).items()):
        is_own = getattr(value, "__module__", None) == module and not name.startswith("_")
        if is_own and (inspect.isroutine(value) or inspect.isclass(value)):
            yield f"{prefix or module}.{name}", value


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


def write(folder: Path) -> None:
    """passages.tsv (evidence), text.jsonl (to pretrain on), train.json and dev.json (DPR), questions.tsv."""
    found = list(entries())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "passages.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["id", "text", "title"])
        writer.writerows((number, entry.text, entry.title) for number, entry in enumerate(found, 1))
    order = random.Random(0).sample(range(len(found)), len(found))
    held_out, trained = order[:HELD_OUT], order[HELD_OUT:]
    texts = {number: f"{found[number].question} {found[number].text}" for number in trained}
    texts |= {number: found[number].text for number in held_out}  # without the question
    lines = [json.dumps({"title": entry.title, "text": texts[number]}) for number, entry in enumerate(found)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, chosen in (("train", trained), ("dev", held_out)):
        records = [in_dpr_format(number + 1, found[number]) for number in chosen]
        (folder / f"{name}.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    asked = [f"{found[number].question}\t{json.dumps([found[number].answer])}" for number in held_out]
    (folder / "questions.tsv").write_text("\n".join(asked) + "\n", encoding="utf-8")
    print(f"{folder}: {len(found)} passages; {HELD_OUT} of their questions are for evaluation")


def in_dpr_format(number: int, entry: Entry) -> dict[str, Any]:
    positive = {"title": entry.title, "text": entry.text, "passage_id": str(number)}
    return {"question": entry.question, "answers": [entry.answer], "positive_ctxs": [positive]}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write(Path(sys.argv[1]))
