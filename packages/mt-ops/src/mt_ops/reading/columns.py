"""Rows of numbers, one a step, to series; a step that a later row repeats counts once, with the later one."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from mt_ops.reading.run import Series

STEP = "iteration"


class Columns:
    """Collects rows. Those with the same names in the same order share a table, which makes adding one quick."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Mapping[str, Any]) -> None:
        """row: with `iteration`. What is no number is left out."""
        names = tuple(row)
        table = self._tables.get(names)
        if table is None:
            table = self._tables[names] = _Table([name for name in names if _is_number(row[name])])
        table.add(row, self._count)
        self._count += 1

    def series(self) -> dict[str, Series]:
        """By name, in the order in which the names came."""
        parts: defaultdict[str, list[tuple[Any, Any, Any]]] = defaultdict(list)
        for table in self._tables.values():
            if STEP in table.names:
                values = table.values()
                steps, order = values[:, table.names.index(STEP)], np.array(table.order)
                for place, name in enumerate(table.names):
                    if name != STEP:
                        parts[name].append((steps, values[:, place], order))
        return {name: _merged(pieces) for name, pieces in parts.items()}


class _Table:
    """Rows with the same names. order: the place of each among all rows."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.order = array("q")
        self._numbers = array("d")
        self._take = itemgetter(*names) if len(names) > 1 else lambda row: tuple(row[name] for name in names)

    def add(self, row: Mapping[str, Any], place: int) -> None:
        length = len(self._numbers)
        try:
            self._numbers.extend(self._take(row))
        except TypeError:
            # What came before the value that is no number was added already.
            del self._numbers[length:]
            self._numbers.extend(_number_or_nan(row[name]) for name in self.names)
        self.order.append(place)

    def values(self) -> Any:
        """[rows, names]"""
        return np.array(self._numbers).reshape(-1, len(self.names))


def _number_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _is_number(value: object) -> bool:
    # None stands for a value that is not finite in JSON written by others.
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _merged(pieces: list[tuple[Any, Any, Any]]) -> Series:
    steps, values, order = (np.concatenate([piece[place] for piece in pieces]) for place in range(3))
    if len(pieces) > 1:
        by_row = np.argsort(order, kind="stable")
        steps, values = steps[by_row], values[by_row]
    return last_of_each_step(steps.astype(np.int64), values)


def last_of_each_step(steps: Any, values: Any) -> Series:
    """steps, values: [n] in the order of writing. A row is dropped where a later one has its step or an earlier step:
    a process continued from a checkpoint before it."""
    if len(steps) == 0:
        return Series(steps.astype(np.int64), values.astype(np.float64))
    following = np.minimum.accumulate(steps[::-1])[::-1]
    kept = np.ones(len(steps), dtype=bool)
    kept[:-1] = steps[:-1] < following[1:]
    return Series(steps[kept], values[kept])
