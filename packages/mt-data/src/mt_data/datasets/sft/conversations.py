"""Conversations from JSON lines (also gzip, Zstandard, Parquet): objects with a list of chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError, did_you_mean
from mt_data.preprocess.readers import iter_records

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]


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


def read_conversations(path: Path, messages_key: str) -> Iterator[Conversation]:
    """The conversations of a file, in order.

    Raises DataError with file and line for a line that is no JSON object, has no list of messages under
    messages_key, or a message whose role is not one of ROLES or whose content is no text.
    """
    for record in iter_records(path):
        where = f"{record.file}, line {record.line}"
        messages = record.value.get(messages_key)
        if messages_key not in record.value:
            raise DataError(
                f'{where} has no key "{messages_key}"; its keys are {", ".join(record.value)}. '
                f"Name the key that holds the list of messages with data.messages_key"
                f"{did_you_mean(messages_key, record.value)}"
            )
        if not isinstance(messages, list) or not messages:
            raise DataError(f'{where}: "{messages_key}" must be a list of at least one message')
        for number, message in enumerate(messages):
            _check_message(message, f"{where}, message {number + 1}")
        yield Conversation(messages, record.value.get("tools"), record.file, record.line)


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
