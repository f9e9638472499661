"""Records of questions with answers and passages.

| keys of a record | |
| --- | --- |
| `question` | a text |
| `answers` (texts), `answer` (a text or texts) or `longform_answer` | the first one is learned |
| `multichoice_options` | of a question with `"qa_type": "multi_choice_qa"`: texts, which get letters |
| `messages` | in place of question and answers: a conversation, whose last message is the answer |
| `passages`, `ctxs` or `bert_pretrain_corpus_neighbours` | each a text, or `{"title": ..., "text": ...}` |
| `sub-paragraphs` or `sub_paragraph` | the one passage of Megatron's files: a text, or `[title, text]` |

A tab-separated file (.tsv, .csv) has questions and answers, as those of Natural Questions (mt_data.questions).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from mt_core.errors import DataError
from mt_data.datasets.sft.conversations import Conversation, Message, check_messages
from mt_data.preprocess.formats import COMPRESSIONS, detect_format, open_stream
from mt_data.preprocess.readers import MalformedRecord, Record, iter_records, json_kind
from mt_data.questions import OnUnusable, iter_questions, raise_unusable

ANSWERS = ("answers", "answer", "longform_answer")
SEVERAL, SINGLE = ("passages", "ctxs", "bert_pretrain_corpus_neighbours"), ("sub-paragraphs", "sub_paragraph")
"""Keys of passages; the first one that a record has counts."""
MULTIPLE_CHOICE = "multi_choice_qa"
TAB_SEPARATED = (".tsv", ".csv")
"""Endings; DPR's files of Natural Questions are named .csv."""


@dataclass(frozen=True)
class QARecord:
    """messages: up to the question. answers: that are right; none in a record without. passages: the best first."""

    messages: list[Message]
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    file: str
    line: int

    @property
    def question(self) -> str:
        """What the user says last."""
        return str(next(message for message in reversed(self.messages) if message["role"] == "user")["content"])

    @property
    def where(self) -> str:
        return f"{self.file}, record {self.line}"

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        return Conversation(list(messages), None, self.file, self.line)


def read_qa_records(path: Path, on_unusable: OnUnusable = raise_unusable) -> Iterator[QARecord]:
    """The records of JSON lines, a JSON array, Parquet or tab-separated questions, in order.

    Raises DataError for a file that cannot be read.
    """
    for record in _records(path, on_unusable):
        try:
            yield qa_record(record)
        except DataError as error:
            on_unusable(record.line, error)


def qa_record(record: Record) -> QARecord:
    """Raises DataError, naming file and place, for a record without a question, or of another form."""
    value, where = record.value, f"{record.file}, record {record.line}"
    passages = tuple(_passages(value, where))
    if "messages" in value:
        messages, answers = _split_conversation(check_messages(value["messages"], "messages", where), where)
        return QARecord(messages, (*answers, *_answers(value, where)), passages, record.file, record.line)
    question = value.get("question")
    if not isinstance(question, str):
        raise DataError(f"{where} needs a text under question, or messages; its keys are {', '.join(value)}")
    if value.get("qa_type") == MULTIPLE_CHOICE:
        question = with_options(question, _texts(value, "multichoice_options", where))
    messages = [{"role": "user", "content": question}]
    return QARecord(messages, tuple(_answers(value, where)), passages, record.file, record.line)


def _split_conversation(messages: list[Message], where: str) -> tuple[list[Message], list[str]]:
    """The messages before the answer, and the answer, if the assistant has the last word."""
    if not any(message["role"] == "user" for message in messages):
        raise DataError(f"{where} has no message of the user, before which passages stand")
    if messages[-1]["role"] != "assistant":
        return messages, []
    if not isinstance(answer := messages[-1].get("content"), str):
        raise DataError(f"{where}: the last message must have a text, which is the answer")
    return messages[:-1], [answer]


def with_options(question: str, options: Sequence[str]) -> str:
    """The question with its options on lines behind it: (A) ..., (B) ..."""
    lines = [f"({letter}) {option}" for letter, option in zip(ascii_uppercase, options, strict=False)]
    return "\n".join([question, *lines])


def passage_text(title: str | None, text: str) -> str:
    """A passage as Megatron-LM writes it; without a title the text alone."""
    return f"title: {title}, source: {text}" if title else text


def _answers(value: Mapping[str, Any], where: str) -> list[str]:
    key = next((key for key in ANSWERS if key in value), None)
    if key is None:
        return []
    texts = [value[key]] if isinstance(value[key], str) else value[key]
    return _texts({key: texts}, key, where)


def _texts(value: Mapping[str, Any], key: str, where: str) -> list[str]:
    texts = value.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: {key} must be a list of texts, and is {json_kind(texts)}")
    return texts


def _passages(value: Mapping[str, Any], where: str) -> Iterator[str]:
    key = next((key for key in (*SEVERAL, *SINGLE) if key in value), None)
    if key is None:
        return
    passages = value[key] if key in SEVERAL else [value[key]]
    if not isinstance(passages, list):
        raise DataError(f"{where}: {key} must be a list of passages, and is {json_kind(passages)}")
    for number, passage in enumerate(passages, 1):
        yield passage_of(passage, f"{where}, {key} {number}")


def passage_of(passage: Any, where: str) -> str:
    """The passage of a text, {"title": ..., "text": ...} or [title, text]. Raises DataError for anything else."""
    if isinstance(passage, dict):
        passage = [passage.get("title") or "", passage.get("text")]
    if isinstance(passage, list) and len(passage) == 2 and all(isinstance(part, str) for part in passage):
        return passage_text(*passage)
    if isinstance(passage, str):
        return passage
    raise DataError(f'{where} must be a text, {{"title": ..., "text": ...}} or [title, text]')


def _records(path: Path, on_unusable: OnUnusable) -> Iterator[Record]:
    def malformed(error: MalformedRecord) -> None:
        on_unusable(error.line, error)

    if _is_tab_separated(path):
        return _of_questions(path, on_unusable)
    if _is_array(path):
        return _of_array(path, on_unusable)
    return iter_records(path, on_malformed=malformed)


def _is_tab_separated(path: Path) -> bool:
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix in TAB_SEPARATED


def _of_questions(path: Path, on_unusable: OnUnusable) -> Iterator[Record]:
    for line, question in iter_questions(path, on_unusable):
        yield Record({"question": question.text, "answers": list(question.answers)}, str(path), line)


def _is_array(path: Path) -> bool:
    input_format = detect_format(path)
    if input_format.kind != "jsonl":
        return False
    with open_stream(path, input_format) as stream:
        # The ending .json means JSON lines; Megatron's NAME_QA_train.json holds one array. A page is enough for the
        # white space that may come before its bracket.
        return stream.read(4096).lstrip().startswith(b"[")


def _of_array(path: Path, on_unusable: OnUnusable) -> Iterator[Record]:
    with open_stream(path, detect_format(path)) as stream:
        try:
            values = json.loads(stream.read())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} begins as a JSON array and is none: {error}") from error
    for number, value in enumerate(values, 1):
        if isinstance(value, dict):
            yield Record(value, str(path), number)
        else:
            on_unusable(number, DataError(f"{path}, record {number} is {json_kind(value)}; it must be an object"))
