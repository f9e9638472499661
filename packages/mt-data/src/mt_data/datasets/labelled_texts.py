"""Labelled texts from tab-separated files and from JSON lines.

A quotation mark is an ordinary character of a tab-separated file, as GLUE's files mean it. A file without the label
column is a test set.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mt_core.errors import DataError
from mt_data.datasets.glue_tasks import Column, TextTask
from mt_data.datasets.pair_encoding import clean_text

NO_LABEL = -1
INT64_DIGITS = 18
"""Numbers of so many digits are int64, the dtype of the numbers of lines."""
_LISTED = 5
log = logging.getLogger(__name__)

Row = Mapping[Column, str]


@dataclass(frozen=True)
class LabelledTexts:
    """One line of a file. label: number of the class, or the number to predict; None when the file has no labels."""

    uid: int
    texts: tuple[str, ...]
    label: float | None
    where: str


def read_all(paths: Sequence[Path], task: TextTask, on_error: str) -> list[LabelledTexts]:
    """All lines of some files, in order; with on_error "skip" bad lines are counted and the first listed.

    Raises DataError for a bad line, a missing column, and a file that is no UTF-8 text.
    """
    found: list[LabelledTexts] = []
    bad: list[str] = []
    for path in paths:
        for line in read_file(path, task):
            if isinstance(line, LabelledTexts):
                found.append(line)
            elif on_error == "raise":
                raise DataError(f'{line}; correct the line, or leave such lines out with data.on_error="skip"')
            else:
                bad.append(line)
    if bad:
        log.warning("left out %d lines, the first: %s", len(bad), "; ".join(bad[:_LISTED]))
    return found


def read_file(path: Path, task: TextTask) -> Iterator[LabelledTexts | str]:
    """The lines of a file, and for one that cannot be used what is wrong with it."""
    if path.suffix != ".jsonl":
        task = _task_of_file(path, task)
    rows = _json_rows(path, task) if path.suffix == ".jsonl" else _tabbed_rows(path, task)
    for index, (row, where) in enumerate(rows):
        yield row if isinstance(row, str) else _parse(row, index, task, where)


def _json_rows(path: Path, task: TextTask) -> Iterator[tuple[Row | str, str]]:
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        if line.strip():
            yield _json_row(line, task, where), where


def _json_row(line: str, task: TextTask, where: str) -> Row | str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return f"{where}: not JSON ({error.msg})"
    except ValueError as error:  # an integer of more digits than Python converts
        return f"{where}: {error}"
    except RecursionError:
        return f"{where}: JSON nested too deeply"
    if not isinstance(value, dict):
        return f"{where}: must be an object with the keys {_listed(task.texts)}"
    row = {key: _as_text(field) for key, field in value.items() if field is not None}
    return _missing_columns(row, row, task, where) or row


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _task_of_file(path: Path, task: TextTask) -> TextTask:
    """The task with the columns of its published test file, where the file is that one."""
    _, first = next(_lines(path), (0, ""))
    if task.test_columns is None or tuple(first.split("\t")) != task.test_columns:
        return task
    number, text = task.test_columns
    # By name: the place of the label in the other files is that of the text here.
    return replace(task, uid=number, texts=(text,), label="label", header=True)


def _tabbed_rows(path: Path, task: TextTask) -> Iterator[tuple[Row | str, str]]:
    lines = ((number, line.split("\t")) for number, line in _lines(path))
    _, first = next(lines, (0, [""]))
    names = [name.strip() for name in first] if task.header else []
    places = range(len(first))
    problem = _missing_columns([*places, *names], names or places, task, f"{path}, line 1")
    if problem is not None:
        raise DataError(problem)
    # The first line was read to count the columns; without a header it is a row too.
    if not task.header:
        yield dict(enumerate(first)), f"{path}, line 1"
    for number, fields in lines:
        where = f"{path}, line {number}"
        if len(fields) != len(first):
            yield (
                f"{where}: {len(fields)} fields, the first line {'names' if names else 'has'} {len(first)} columns",
                where,
            )
        else:
            # By place and by name: tasks name their columns either way. Without a header `names` is empty.
            yield {**dict(enumerate(fields)), **dict(zip(names, fields, strict=False))}, where


def _missing_columns(found: Iterable[Column], names: Iterable[Column], task: TextTask, where: str) -> str | None:
    """What is wrong with the columns; None: nothing. found: by name and by place. names: those that are listed."""
    required = [column for column in (task.uid, *task.texts) if column is not None]
    has = set(found)
    missing = [column for column in required if column not in has]
    if not missing:
        return None
    return (
        f"{where}: there is no column {_listed(missing)}; the columns must be {_listed(required)} and, but for a test "
        f"set, {task.label}. They are {_listed(names)}"
    )


def _listed(columns: Iterable[Column]) -> str:
    return ", ".join(map(str, columns))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        # newline="\n": a lone carriage return within a text must not end the line.
        with path.open(encoding="utf-8-sig", newline="\n") as file:  # MRPC's files begin with a byte-order mark
            for line in file:
                number += 1
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read behind line {number}: {error}") from error


def _parse(row: Row, index: int, task: TextTask, where: str) -> LabelledTexts | str:
    uid = str(index) if task.uid is None else row[task.uid].strip()
    if not uid.isdecimal() or len(uid) > INT64_DIGITS:
        return f"{where}: {task.uid} is {uid!r}, which is no number of at most {INT64_DIGITS} digits"
    texts = tuple(clean_text(row[column]).strip() for column in task.texts)
    if "" in texts:
        return f"{where}: {task.texts[texts.index('')]} is empty"
    label = row.get(task.label)
    if label is None:
        return LabelledTexts(int(uid), texts, None, where)
    number = _number_of(label.strip(), task)
    if number is None:
        legal = "it must be a number" if task.labels is None else f"known are {', '.join(task.labels)}"
        return f"{where}: {task.label} is {label.strip()!r}, {legal}"
    return LabelledTexts(int(uid), texts, number, where)


def _number_of(label: str, task: TextTask) -> float | None:
    """Of the class, or the label itself; None for a label that the task does not have."""
    if task.labels is not None:
        return task.labels.index(label) if label in task.labels else None
    try:
        number = float(label)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
