"""The tests that `long_tests.txt` lists cost a CPU second or more and have the mark `long`.

Marks of single cases of a grid would say the same in seventy modules and be wrong after the next change of what tests
share. The list is written from what the tests cost:

    uv run pytest -m "not exhaustive" -o costs=costs.jsonl
    uv run python -m tests.long_tests costs.jsonl

A line is a test, or with `*` at its end all tests that begin so: trainings that take their turns in shared processes,
whose cost is that of whichever is first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 1.0
"""CPU seconds from which a test is listed: so that `uv run pytest` keeps its budget (CONTRIBUTING.md)."""


class LongTests:
    """Which tests the list names."""

    def __init__(self, lines: list[str]) -> None:
        self.beginnings = tuple(line[:-1] for line in lines if line.endswith("*"))
        self.tests = {line for line in lines if not line.endswith("*")}

    def __contains__(self, test: str) -> bool:
        return test in self.tests or test.startswith(self.beginnings)


def listed() -> list[str]:
    return LIST.read_text(encoding="utf-8").splitlines()


def listed_anew(lines: list[str], costs: dict[str, float]) -> list[str]:
    """The list after a measurement: a test that was not measured stays as it is, a beginning always."""
    beginnings = LongTests([line for line in lines if line.endswith("*")])
    kept = [line for line in lines if line.endswith("*") or line not in costs]
    costly = [test for test, cost in costs.items() if cost >= SECONDS and test not in beginnings]
    return sorted({*kept, *costly})


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        costs = {line["test"]: line["cpu_seconds"] for line in map(json.loads, file)}
    LIST.write_text("\n".join(listed_anew(listed(), costs)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
