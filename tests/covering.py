"""The part of a grid of cases that runs by default; the rest is `exhaustive` and runs with `-m exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(rows: Sequence[Any], columns: Sequence[Any], of_each_row: int = 1) -> list[Any]:
    """Every row with every column, as parameters of a test. By default run `of_each_row` columns of each row, in turn,
    so that each row and each column is there."""
    assert len(rows) * of_each_row >= len(columns), "some column would never run by default"
    return [
        pytest.param(row, column, marks=() if (j - i * of_each_row) % len(columns) < of_each_row else EXHAUSTIVE)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def uncovered_pairs(default: Iterable[Sequence[Any]], further: Iterable[Sequence[Any]]) -> set[tuple[Any, Any]]:
    """What occurs together in one of the further cases, and in none of the default ones."""
    return {pair for case in further for pair in _pairs(case)} - {pair for case in default for pair in _pairs(case)}


def _pairs(case: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return combinations(sorted(set(case)), 2)


EXHAUSTIVE = pytest.mark.exhaustive
