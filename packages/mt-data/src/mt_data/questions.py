"""Questions with their answers, from the files of Natural Questions as DPR has them.

A line is: question, tab, list of answers as Python or JSON writes it. The file has no line of names, and may be
compressed (.gz, .zst). Lists are parsed as literals, never evaluated.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mt_core.errors import DataError
from mt_data.preprocess.formats import open_text

OnUnusable = Callable[[int, DataError], None]
"""Called with the number of a record that cannot be used, and why; reading continues unless the call raises."""


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]


def raise_unusable(number: int, error: DataError) -> None:
    """The default: the first unusable record ends the reading."""
    raise error


def read_questions(path: Path) -> list[Question]:
    """Raises DataError for a file that cannot be read, has no questions, or a line that is none."""
    return [question for _, question in iter_questions(path)]


def iter_questions(path: Path, on_unusable: OnUnusable = raise_unusable) -> Iterator[tuple[int, Question]]:
    """Questions with their lines, from 1. Raises DataError for a file that cannot be read or has no lines."""
    lines = 0
    try:
        with open_text(path, newline="") as file:
            for lines, fields in _records(file):
                try:
                    question = _question(fields, f"{path}, line {lines}")
                except DataError as error:
                    on_unusable(lines, error)
                else:
                    yield lines, question
    except csv.Error as error:
        raise DataError(f"the questions {path} cannot be read: {error}") from error
    if not lines:
        raise DataError(f"{path} has no questions; a line is a question, a tab, and a list of answers")


def _records(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file, delimiter="\t")
    # line_num counts physical lines, so a quoted field with line ends is named by its last line.
    yield from ((reader.line_num, fields) for fields in reader if fields)


def _question(fields: list[str], where: str) -> Question:
    if len(fields) != 2:
        raise DataError(
            f"{where} has {len(fields)} fields; it must have two, a question and its answers, with a tab between"
        )
    answers = _literal(fields[1], where)
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f'{where}: the answers are {fields[1][:60]}; they must be a list of texts, such as ["Paris"]')
    return Question(fields[0], tuple(answers))


def _literal(text: str, where: str) -> object:
    try:
        # DPR's own files have lists as Python prints them, with single quotes, which JSON refuses; literal_eval below
        # accepts literals alone, no names and no calls.
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(f"{where}: the answers {text[:60]} are no list as Python or JSON writes it") from error
