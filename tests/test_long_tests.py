"""Which tests have the mark `long` by the list."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.long_tests import LongTests, listed, listed_anew

ROOT = Path(__file__).parent.parent


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""


def test_what_is_listed_exists() -> None:
    functions = {line.partition("[")[0].rstrip("*") for line in listed()}
    named = [function.partition("::") for function in functions]
    assert [f"{path}::{name}" for path, _, name in named if f"def {name}" not in source(path)] == []


def test_tests_are_named_one_by_one_or_by_how_they_begin() -> None:
    tests = LongTests(["a.py::one[x]", "b.py::*"])
    assert "a.py::one[x]" in tests
    assert "b.py::any" in tests
    assert "a.py::one" not in tests
    assert "a.py::one" not in LongTests([])


def test_a_measurement_makes_the_list_anew() -> None:
    costs = {"a.py::now_quick": 0.1, "a.py::slow": 1.5, "b.py::first": 9.0, "c.py::quick": 0.2}
    lines = ["a.py::now_quick", "b.py::*", "d.py::elsewhere"]
    assert listed_anew(lines, costs) == ["a.py::slow", "b.py::*", "d.py::elsewhere"]
