"""JSON lines as a parquet file, whatever their columns hold.

A column has the type that its values have in common: texts, truth values, whole numbers, numbers, lists, objects (a
key that one lacks is null). Where they have none, such as a number and a text, each is its JSON as a text. Texts stay
texts: one that looks like a date is no timestamp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

ROWS = 1024
"""Lines that are in memory at a time."""
DEEPEST = 32
"""Lists and objects within one another."""
EXACT_IN_FLOAT, LARGEST = 2**53, 2**63
TEXT, BOOL, FLOAT, INT, LONG, MIXED = "text", "bool", "float", "int", "long", "mixed"
"""Whole numbers are LONG where a float64 rounds them."""


@dataclass(frozen=True)
class ListOf:
    entries: Kind


Kind = None | str | ListOf | dict[str, "Kind"]
"""None: of null alone. A dictionary: of an object, by its keys."""


def write_parquet(lines: Path, target: Path) -> None:
    """lines: a JSON object each, from which a column of `target` has the values of one key."""
    import pyarrow
    import pyarrow.parquet

    # Two passes over the lines: a column's type is known after the last line, and a parquet file's schema comes first.
    columns: dict[str, Kind] = {}
    for records in _batches(lines):
        for record in records:
            for name, value in record.items():
                columns[name] = common(columns.get(name), kind_of(value))
    columns = {name: _storable(kind) for name, kind in columns.items()}
    schema = pyarrow.schema([(name, arrow_type(kind)) for name, kind in columns.items()])
    with pyarrow.parquet.ParquetWriter(target, schema) as writer:
        for records in _batches(lines):
            # Row groups of ROWS lines: memory does not grow with the file.
            arrays = [
                pyarrow.array([_stored(record.get(name), kind) for record in records], arrow_type(kind))
                for name, kind in columns.items()
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _batches(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open(encoding="utf-8") as file:
        while batch := [json.loads(line) for line in islice(file, ROWS)]:
            yield batch


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Kind of a JSON value."""
    # Deeper values are stored as JSON texts, before recursion or pyarrow fail on them.
    if depth > DEEPEST:
        return MIXED
    match value:
        case None:
            return None
        # Before int, of which bool is a subclass.
        case bool():
            return BOOL
        case int():
            # int64 beside floats becomes float64, exact up to 2^53 only; larger ones would be rounded, so that LONG and
            # FLOAT are MIXED.
            return INT if abs(value) <= EXACT_IN_FLOAT else LONG if -LARGEST <= value < LARGEST else MIXED
        case float():
            return FLOAT
        case list():
            return ListOf(reduce(common, (kind_of(entry, depth + 1) for entry in value), None))
        case dict():
            return {key: kind_of(entry, depth + 1) for key, entry in value.items()}
    return TEXT


def common(first: Kind, other: Kind) -> Kind:
    """What values of both kinds have in common."""
    if first is None or first == other:
        return other
    if other is None:
        return first
    if isinstance(first, ListOf) and isinstance(other, ListOf):
        return ListOf(common(first.entries, other.entries))
    if isinstance(first, dict) and isinstance(other, dict):
        # Fields of a struct are the union of the keys.
        return {key: common(first.get(key), other.get(key)) for key in first | other}
    pair = (first, other)
    if MIXED not in pair and all(kind in (INT, LONG, FLOAT) for kind in pair):
        return LONG if FLOAT not in pair else FLOAT if LONG not in pair else MIXED
    return MIXED


def arrow_type(kind: Kind) -> pyarrow.DataType:
    import pyarrow

    if isinstance(kind, ListOf):
        return pyarrow.list_(arrow_type(kind.entries))
    if isinstance(kind, dict):
        return pyarrow.struct([(key, arrow_type(entry)) for key, entry in kind.items()])
    types = {None: pyarrow.null, BOOL: pyarrow.bool_, INT: pyarrow.int64, LONG: pyarrow.int64, FLOAT: pyarrow.float64}
    return types.get(kind, pyarrow.string)()


def _storable(kind: Kind) -> Kind:
    """The kind of the column: parquet has no object without keys."""
    return MIXED if _is_within(kind, MIXED) or _is_within(kind, {}) else kind


def _is_within(kind: Kind, wanted: Kind) -> bool:
    if kind == wanted:
        return True
    if isinstance(kind, ListOf):
        return _is_within(kind.entries, wanted)
    return isinstance(kind, dict) and any(_is_within(entry, wanted) for entry in kind.values())


def _stored(value: Any, kind: Kind) -> Any:
    # null stays null, and is not the text "null".
    return value if value is None or kind != MIXED else json.dumps(value, ensure_ascii=False)
