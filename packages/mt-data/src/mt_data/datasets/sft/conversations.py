"""Conversations and plain texts, as records of any format become them, and the checks of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_core.errors import DataError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
FLAGS = ("training", "train", "loss_mask", "loss", "weight")
"""Keys of a message that say whether its turn is trained, of axolotl, ms-swift and OpenAI: true, false, 1, 0."""

OF_TEMPLATES = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "channel", "prefix")
"""Keys of a message that templates read and that are no misspelt flags."""


def place(file: str, line: int) -> str:
    """ "chats.jsonl, line 3" """
    return f"{file}, {'row' if file.endswith('.parquet') else 'line'} {line}"


@dataclass(frozen=True)
class Conversation:
    """Checked messages, the tools offered (for the template) and the place in the file."""

    messages: list[Message]
    tools: list[Any] | None
    file: str
    line: int
    trained: frozenset[int] | None = None
    """Numbers of the messages that are trained; None: all of the assistant's."""
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (chat_template_kwargs)."""

    @property
    def where(self) -> str:
        return place(self.file, self.line)

    def turns_of(self, role: str) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == role]

    def trained_turns(self) -> list[int]:
        """Numbers of the assistant's messages that are trained."""
        turns = self.turns_of("assistant")
        return turns if self.trained is None else [turn for turn in turns if turn in self.trained]


@dataclass(frozen=True)
class PlainText:
    """A text that no template is applied to. prompt: its beginning, which is not trained."""

    prompt: str
    completion: str
    file: str
    line: int

    @property
    def where(self) -> str:
        return place(self.file, self.line)


def check_messages(messages: object, key: str, where: str) -> list[Message]:
    """The messages of a record, under `key` of it, without flags of turns. Raises DataError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: "{key}" must be a list of at least one message')
    return [_checked(message, f"{where}, message {number + 1}") for number, message in enumerate(messages)]


def flagged_turns(messages: list[Any], where: str) -> frozenset[int] | None:
    """Numbers of the messages that are trained by their own flags; None where no message has one.

    A message without a flag is trained if it is the assistant's. Raises DataError for flags that are neither true nor
    false, that contradict each other, and that ask for another role's turn.
    """
    flags = {number: _flag(message, f"{where}, message {number + 1}") for number, message in enumerate(messages)}
    if all(flag is None for flag in flags.values()):
        return None
    return frozenset(
        number for number, flag in flags.items() if flag or (flag is None and messages[number]["role"] == "assistant")
    )


def _flag(message: Message, where: str) -> bool | None:
    values = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            raise DataError(f'{where}: "{key}" is {value!r}; it says whether the turn is trained: true, false, 1 or 0')
    if len(meanings := {bool(value) for value in values.values()}) > 1:
        raise DataError(f"{where}: {' and '.join(values)} contradict each other; keep one of them")
    if (flag := next(iter(meanings), None)) and message["role"] != "assistant":
        raise DataError(
            f"{where} ({message['role']}) is to be trained, and only the assistant's turns can be; remove the key, or "
            'train on all tokens with data.train_on="all"'
        )
    return flag


def _checked(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "..."}}')
    role = message.get("role")
    if role not in ROLES:
        raise DataError(
            f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}{did_you_mean(str(role), ROLES)}"
        )
    _refuse_misspelt_flags(message, where)
    # Keys without a value are those of other messages of a Parquet file, whose rows all have the same ones.
    kept = {
        key: value for key, value in message.items() if key not in FLAGS and (value is not None or key == "content")
    }
    if isinstance(kept.get("content"), list):
        kept["content"] = _joined_parts(kept["content"], where)
    if isinstance(kept.get("content"), str) or _has_calls_alone(kept):
        return kept
    raise DataError(
        f'{where} ({role}) needs a text under "content"; only an assistant\'s message with tool_calls may have none'
    )


def _refuse_misspelt_flags(message: Message, where: str) -> None:
    """Templates may read any key, so that only one is refused that looks like a flag and has the value of one."""
    for key, value in message.items():
        named = key in (*FLAGS, *OF_TEMPLATES, "role", "content")
        if not named and value in (0, 1) and (meant := did_you_mean(key, FLAGS)):
            raise DataError(
                f'{where} has the key "{key}", which nothing reads{meant}; flags of turns are {", ".join(FLAGS)}'
            )


def _has_calls_alone(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls")) and message.get("content") is None


def _joined_parts(parts: list[Any], where: str) -> str:
    """The text of a content that is a list of parts, as OpenAI's interface has them."""
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f'{where}: "content" has a part of type {kind!r}; data.dataset_type="sft" takes texts alone, and '
                '"image_text" images too'
            )
    return "".join(part["text"] for part in parts)
