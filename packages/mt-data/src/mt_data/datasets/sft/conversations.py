"""Conversations from JSON lines (also gzip, Zstandard, Parquet): objects with a list of chat messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError, did_you_mean
from mt_data.preprocess.readers import MalformedRecord, Record, iter_records

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
OnBadLine = Callable[[int, DataError], None]
"""Called with the number of a line that cannot be used, and why; reading goes on after it unless the call raises."""


def raise_bad_line(line: int, error: DataError) -> None:
    """The default: the first unusable line ends the reading."""
    raise error


@dataclass(frozen=True)
class Conversation:
    """Checked messages, the tools offered (for the template) and the place in the file."""

    messages: list[Message]
    tools: list[Any] | None
    file: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.line}"

    def turns_of(self, role: str) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == role]


def read_conversations(
    path: Path, messages_key: str, on_bad_line: OnBadLine = raise_bad_line
) -> Iterator[Conversation]:
    """The conversations of a file, in order.

    `on_bad_line` is given the DataError, with file and line, for a line that is no JSON object, has no list of
    messages under messages_key, or a message whose role is not one of ROLES or whose content is no text. It raises it
    by default. A file that cannot be read, or is cut short, is a DataError always.
    """

    def malformed(error: MalformedRecord) -> None:
        on_bad_line(error.line, error)

    for record in iter_records(path, on_malformed=malformed):
        try:
            conversation = _conversation(record, messages_key)
        except DataError as error:
            on_bad_line(record.line, error)
        else:
            yield conversation


def _conversation(record: Record, messages_key: str) -> Conversation:
    where = f"{record.file}, line {record.line}"
    messages = record.value.get(messages_key)
    if messages_key not in record.value:
        raise DataError(
            f'{where} has no key "{messages_key}"; its keys are {", ".join(record.value)}. '
            f"Name the key that holds the list of messages with data.messages_key"
            f"{did_you_mean(messages_key, record.value)}"
        )
    checked = check_messages(messages, messages_key, where)
    return Conversation(checked, record.value.get("tools"), record.file, record.line)


def check_messages(messages: object, key: str, where: str) -> list[Message]:
    """The messages of a record, under `key` of it. Raises DataError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: "{key}" must be a list of at least one message')
    for number, message in enumerate(messages):
        _check_message(message, f"{where}, message {number + 1}")
    return messages


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "..."}}')
    role = message.get("role")
    if role not in ROLES:
        raise DataError(
            f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}{did_you_mean(str(role), ROLES)}"
        )
    if isinstance(message.get("content"), str):
        return
    if role == "assistant" and message.get("tool_calls") and message.get("content") is None:
        return
    raise DataError(
        f'{where} ({role}) needs a text under "content"; only an assistant\'s message with tool_calls may have none'
    )
