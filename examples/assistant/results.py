"""What each stage has changed: python results.py FOLDER NAME ...

Of each NAME, FOLDER has NAME-text.json of `mt eval ppl`, NAME-answers.json of `mt eval generation` and NAME.jsonl of
`mt generate`. Prints a table with a row for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KINDS = ("module", "arguments", "summary")
"""Kinds of questions, as questions.py writes them."""


def text_of(line: Line) -> str:
    text: str = line["completions"][0]["text"]
    return text.strip()


def is_right(line: Line) -> bool:
    return text_of(line) == line["answer"]


def ends(line: Line) -> bool:
    """Whether the model has ended its answer, and with a full stop."""
    return line["completions"][0]["finish_reason"] == "stop" and text_of(line).endswith(".")


def share(lines: list[Line], holds: Callable[[Line], bool]) -> float:
    return sum(map(holds, lines)) / len(lines) if lines else 0.0


def columns(folder: Path, name: str) -> dict[str, str]:
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    text, answers = (json.loads((folder / f"{name}-{what}.json").read_text()) for what in ("text", "answers"))
    of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in KINDS}
    summaries = of_kind["summary"]
    words = sum(len(text_of(line).split()) for line in summaries) / max(len(summaries), 1)
    return {
        "stage": name,
        "bits a byte": f"{metric(text, 'bits_per_byte'):.2f}",
        "F1 of answers": f"{metric(answers, 'f1'):.2f}",
        **{f"right: {kind}": f"{share(of_kind[kind], is_right):.0%}" for kind in ("module", "arguments")},
        "ends": f"{share(summaries, ends):.0%}",
        "words": f"{words:.0f}",
    }


def metric(result: dict[str, Any], name: str) -> float:
    """The metric of the one task of a result file."""
    ((_, task),) = result["tasks"].items()
    value: float = task["metrics"][name]
    return value


def main(folder: Path, names: list[str]) -> None:
    rows = [columns(folder, name) for name in names]
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
