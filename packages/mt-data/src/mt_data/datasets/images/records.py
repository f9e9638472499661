"""Lines that name an image with its text, or its conversation as LLaVA's files write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError, did_you_mean
from mt_data.datasets.sft.conversations import Conversation, Message
from mt_data.preprocess.readers import iter_records

MARK = "<image>"
"""Where the image stands in a text."""
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""`from` of a turn, and the role that it means."""


@dataclass(frozen=True)
class ImageText:
    """An image with a text, or with the conversation that stands in its place. Either has MARK once."""

    image: Path
    text: str | Conversation
    where: str


def read_pairs(path: Path, image_folder: str | None) -> Iterator[ImageText]:
    """The lines of a file. Raises DataError for one without an image, or with neither text nor conversation."""
    folder = path.parent if image_folder is None else Path(image_folder)
    for record in iter_records(path):
        value, where = record.value, f"{record.file}, line {record.line}"
        image = folder / text_of(value, "image", where)
        if "conversations" in value:
            messages = marked_messages(messages_of(value["conversations"], where), where)
            yield ImageText(image, Conversation(messages, None, record.file, record.line), where)
        else:
            yield ImageText(image, marked_text(text_of(value, "text", where), where), where)


def text_of(value: Mapping[str, object], key: str, where: str) -> str:
    """The text under a key of a line. Raises DataError when there is none."""
    text = value.get(key)
    if not isinstance(text, str) or not text:
        found = repr(text) if key in value else f"only the keys {', '.join(value)}"
        raise DataError(f'{where}: expected a text under "{key}", found {found}{did_you_mean(key, value)}')
    return text


def messages_of(turns: Any, where: str) -> list[Message]:
    """Turns with `from` and `value` as messages with role and content."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f'{where}: "conversations" must be a list of at least one turn')
    return [_message(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict) or turn.get("from") not in SPEAKERS or not isinstance(turn.get("value"), str):
        raise DataError(
            f'{where}: expected {{"from": one of {", ".join(SPEAKERS)}, "value": a text}}, found {turn!r:.200}'
        )
    return {"role": SPEAKERS[turn["from"]], "content": turn["value"]}


def marked_text(text: str, where: str) -> str:
    """With the mark, before it if it has none. Raises DataError for more than one."""
    return text if _count(text.count(MARK), where) else MARK + text


def marked_messages(messages: list[Message], where: str) -> list[Message]:
    """With the mark: in a line of its own before what the user says first, if they have none."""
    if _count(sum(message["content"].count(MARK) for message in messages), where):
        return messages
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    content = f"{MARK}\n{messages[first]['content']}"
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _count(marks: int, where: str) -> int:
    if marks > 1:
        raise DataError(f'{where} has "{MARK}" {marks} times, and one image; a sample has one')
    return marks
