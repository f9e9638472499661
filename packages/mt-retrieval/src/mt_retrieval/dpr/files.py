"""Questions with passages from DPR's JSON files.

A file is an array (or JSON lines) of objects with `question`, `positive_ctxs`, `negative_ctxs`, `hard_negative_ctxs`
and `answers`; a passage has `title` and `text`, and may have `passage_id`. Files may be compressed (.gz,
.zst).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_data.preprocess.formats import open_text

NEGATIVES = ("hard_negative_ctxs", "negative_ctxs")


@dataclass(frozen=True, slots=True)
class Context:
    """id: as the file has it; None where it has none."""

    title: str
    text: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingQuestion:
    """positives: at least one."""

    question: str
    answers: tuple[str, ...]
    positives: tuple[Context, ...]
    hard_negatives: tuple[Context, ...]
    negatives: tuple[Context, ...]


def read_training_questions(path: Path) -> list[TrainingQuestion]:
    """Questions without a positive passage are left out, as DPR does.

    Raises DataError for a file that cannot be read or has no such questions, and for a record of another form.
    """
    questions = [
        _question(value, f"{path}, question {number}")
        for number, value in enumerate(_records(path), 1)
        if not isinstance(value, dict) or value.get("positive_ctxs") != []
    ]
    if not questions:
        raise DataError(f"{path} has no question with a passage in positive_ctxs")
    return questions


def _records(path: Path) -> list[Any]:
    """The JSON values of an array or of lines."""
    with open_text(path) as file:
        text = file.read()
    try:
        if text.lstrip()[:1] == "[":
            return list(json.loads(text))
        # Not splitlines: texts may have other line separators, such as U+2028.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON array or JSON lines: {error}") from error


def _question(value: Any, where: str) -> TrainingQuestion:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object with question and positive_ctxs")
    missing = [key for key in ("question", "positive_ctxs") if key not in value]
    if missing:
        raise DataError(f"{where} has no {' and no '.join(missing)}; its keys are {', '.join(value)}")
    if not isinstance(value["question"], str):
        raise DataError(f"{where}: question must be a text")
    answers = value.get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: answers must be a list of texts")
    positives, *negatives = (_contexts(value, key, where) for key in ("positive_ctxs", *NEGATIVES))
    return TrainingQuestion(value["question"], tuple(answers), positives, *negatives)


def _contexts(value: Mapping[str, Any], key: str, where: str) -> tuple[Context, ...]:
    contexts = value.get(key, [])
    if not isinstance(contexts, list):
        raise DataError(f"{where}: {key} must be a list of passages")
    return tuple(_context(context, f"{where}, {key} {number}") for number, context in enumerate(contexts, 1))


def _context(value: Any, where: str) -> Context:
    fields = [value.get(name) for name in ("title", "text")] if isinstance(value, dict) else [None]
    if not all(isinstance(field, str) for field in fields):
        raise DataError(f"{where} must have a title and a text")
    # DPR's files have one name or the other.
    number = value.get("passage_id", value.get("psg_id"))
    return Context(value["title"], value["text"], None if number is None else str(number))
