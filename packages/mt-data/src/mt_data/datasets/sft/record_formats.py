"""The formats of records that people have for fine-tuning, each turned into a `Conversation` or a `PlainText`.

messages            messages: [{role, content}], with tools and chat_template_kwargs
prompt-completion   prompt and completion: two texts, or two lists of messages
sharegpt            conversations: [{from, value}], with system and tools
alpaca              instruction and output, with input, system and history
text                text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mt_core.errors import DataError, did_you_mean
from mt_data.datasets.sft.conversations import Conversation, Message, PlainText, check_messages, flagged_turns, place
from mt_data.preprocess.readers import Record

Example = Conversation | PlainText
AUTO, MESSAGES, PROMPT_COMPLETION, SHAREGPT, ALPACA, TEXT = (
    "auto",
    "messages",
    "prompt-completion",
    "sharegpt",
    "alpaca",
    "text",
)
PREFERENCE = ("chosen", "rejected")


class RecordReader:
    """Turns the records of one file into examples.

    record_format: the name of a format, or "auto": that of the first record, which all others of the file must have.
    messages_key: key of the list of messages.
    """

    def __init__(self, record_format: str = AUTO, messages_key: str = MESSAGES) -> None:
        self.messages_key = messages_key
        self.format = None if record_format == AUTO else record_format
        self._first: str | None = None
        self._convert: Mapping[str, Callable[[Record], Example]] = {
            MESSAGES: self._from_messages,
            PROMPT_COMPLETION: _from_prompt,
            SHAREGPT: _from_sharegpt,
            ALPACA: _from_alpaca,
            TEXT: _from_text,
        }

    def example(self, record: Record) -> Example:
        """Raises DataError, naming the record, for one of no or of several formats, of another than the file's others,
        and for one that its format does not allow."""
        if self.format is None:
            self.format, self._first = self._detect(record), place(record.file, record.line)
        elif self._first is not None and (detected := self._detect(record)) != self.format:
            raise DataError(
                f"{place(record.file, record.line)} is a record of the format {detected}, and {self._first} one of "
                f"{self.format}; put them into two files, or name the format with data.record_format"
            )
        return self._convert[self.format](record)

    def _detect(self, record: Record) -> str:
        where, fields = place(record.file, record.line), record.value
        fitting = [name for name, fits in self._detectors() if fits(fields)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise DataError(
                f"{where} could be a record of {' or of '.join(fitting)}, by its keys {', '.join(fields)}; say which "
                f'with data.record_format="{fitting[0]}"'
            )
        if all(key in fields for key in PREFERENCE):
            raise DataError(
                f"{where} is a pair of a chosen and a rejected answer, which are trained by preferences (mt tune dpo); "
                "for supervised fine-tuning write the chosen answer as messages"
            )
        raise DataError(
            f'{where} has no key "{self.messages_key}"; its keys are {", ".join(fields)}. Name the key that holds the '
            f"list of messages with data.messages_key, or write a record of another format: prompt and completion, "
            f"conversations, instruction and output, or text{did_you_mean(self.messages_key, fields)}"
        )

    def _detectors(self) -> Iterable[tuple[str, Callable[[Mapping[str, Any]], bool]]]:
        return (
            # A list of {from, value} under any key is ShareGPT's.
            (MESSAGES, lambda fields: self.messages_key in fields and not _is_sharegpt(fields, self.messages_key)),
            (PROMPT_COMPLETION, lambda fields: "prompt" in fields and "completion" in fields),
            (SHAREGPT, lambda fields: any(_is_sharegpt(fields, key) for key in ("conversations", self.messages_key))),
            (ALPACA, lambda fields: "instruction" in fields and "output" in fields),
            (TEXT, lambda fields: isinstance(fields.get("text"), str)),
        )

    def _from_messages(self, record: Record) -> Conversation:
        if self.messages_key not in record.value:
            raise DataError(
                f'{place(record.file, record.line)} has no key "{self.messages_key}"; its keys are '
                f"{', '.join(record.value)}. Name the key that holds the list of messages with data.messages_key"
                f"{did_you_mean(self.messages_key, record.value)}"
            )
        return _conversation(record, record.value[self.messages_key], self.messages_key)


def _conversation(record: Record, messages: Any, key: str, trained: frozenset[int] | None = None) -> Conversation:
    where, fields = place(record.file, record.line), record.value
    if record.file.endswith(".parquet"):  # rows have the keys of all rows, without values where a row has none
        messages, fields = (
            [{"content": None, **message} for message in _without_nulls(messages)],
            _without_nulls(fields),
        )
    checked = check_messages(messages, key, where)
    flagged = flagged_turns(messages, where)
    if flagged is not None:
        trained = flagged if trained is None else flagged & trained
    if is_without_answers(checked, trained):
        raise DataError(
            f"{where}: every answer to train on is empty, so that nothing but their end would be learnt; remove the "
            "record"
        )
    calls = [_with_objects(message, where) for message in checked]
    values = _parsed(fields.get("chat_template_kwargs"), "chat_template_kwargs", dict, where) or {}
    return Conversation(
        calls, _parsed(fields.get("tools"), "tools", list, where), record.file, record.line, trained, values
    )


def is_without_answers(messages: Sequence[Mapping[str, Any]], trained: frozenset[int] | None) -> bool:
    """Whether the assistant's messages that count (trained; None: all) have neither text nor anything else."""
    answers = [
        message
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and (trained is None or number in trained)
    ]
    return bool(answers) and all(
        message.keys() <= {"role", "content"} and not message["content"] for message in answers
    )


# -- prompt and completion ---------------------------------------------------------------------------


def _from_prompt(record: Record) -> Example:
    where = place(record.file, record.line)
    prompt, completion = (_required(record, key) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise DataError(f'{where}: "completion" is empty, so nothing would be learnt of it; remove the record')
        return PlainText(prompt, completion, record.file, record.line)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise DataError(
            f'{where}: "prompt" and "completion" must both be texts, or both be lists of messages; they are '
            f"{type(prompt).__name__} and {type(completion).__name__}"
        )
    check_messages(prompt, "prompt", where)
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f'{where}: "prompt" ends with a message of the assistant, which the completion would go on with; put both '
            "into one message of the completion"
        )
    check_messages(completion, "completion", where)
    whole = [*prompt, *completion]
    trained = [number for number in range(len(prompt), len(whole)) if whole[number]["role"] == "assistant"]
    return _conversation(record, whole, "prompt", frozenset(trained))


def _from_text(record: Record) -> PlainText:
    text = _required(record, "text")
    if not isinstance(text, str) or not text:
        raise DataError(f'{place(record.file, record.line)}: "text" must be a text that is not empty')
    return PlainText("", text, record.file, record.line)


def _required(record: Record, key: str) -> Any:
    if key not in record.value:
        raise DataError(
            f'{place(record.file, record.line)} has no key "{key}"; its keys are {", ".join(record.value)}. '
            "data.record_format says what records look like"
        )
    return record.value[key]


# -- ShareGPT ----------------------------------------------------------------------------------------

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""ShareGPT's `from` -> role."""


def _is_sharegpt(fields: Mapping[str, Any], key: str) -> bool:
    turns = fields.get(key)
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def _from_sharegpt(record: Record) -> Conversation:
    where, fields = place(record.file, record.line), record.value
    key = next((name for name in fields if _is_sharegpt(fields, name)), "conversations")
    turns = _required(record, key)
    if not isinstance(turns, list) or not turns:
        raise DataError(f'{where}: "{key}" must be a list of at least one turn with "from" and "value"')
    messages = [_spoken(turn, f"{where}, turn {number + 1}") for number, turn in enumerate(turns)]
    return _conversation(record, [*_system(fields, messages), *messages], key)


def _spoken(turn: object, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f'{where} must be an object such as {{"from": "human", "value": "..."}}')
    speaker = turn.get("from")
    if speaker not in SPEAKERS:
        raise DataError(
            f"{where} is from {speaker!r}; it must be one of {', '.join(SPEAKERS)}"
            f"{did_you_mean(str(speaker), SPEAKERS)}"
        )
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {**others, "role": SPEAKERS[speaker], "content": turn["value"]}
    calls = _json_value(turn["value"], "value", where)
    listed = calls if isinstance(calls, list) else [calls]
    return {
        **others,
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in listed],
    }


def _system(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[Message]:
    text = fields.get("system")
    if not isinstance(text, str) or not text or messages[0]["role"] == "system":
        return []
    return [{"role": "system", "content": text}]


# -- Alpaca ------------------------------------------------------------------------------------------


def _from_alpaca(record: Record) -> Conversation:
    where, fields = place(record.file, record.line), record.value
    instruction, output = _required(record, "instruction"), _required(record, "output")
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(fields.get(key), str | None):
            raise DataError(f'{where}: "{key}" must be a text')
    asked = "\n".join(part for part in (instruction, fields.get("input")) if part)
    rounds = [*_history(fields.get("history"), where), (asked, output)]
    messages = [
        {"role": role, "content": content}
        for question, answer in rounds
        for role, content in (("user", question), ("assistant", answer))
    ]
    return _conversation(record, [*_system(fields, messages), *messages], "instruction")


def _history(history: Any, where: str) -> list[tuple[str, str]]:
    for entry in history or []:
        if not (isinstance(entry, list | tuple) and len(entry) == 2 and all(isinstance(text, str) for text in entry)):
            raise DataError(f'{where}: "history" must be a list of pairs of question and answer')
    return [(question, answer) for question, answer in history or []]


# -- tools -------------------------------------------------------------------------------------------


def _with_objects(message: Message, where: str) -> Message:
    """The message with the arguments of its calls as objects, as templates expect them; OpenAI writes them as texts."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call(call, where) for call in message["tool_calls"]]}


def _call(call: Any, where: str) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{where}: "tool_calls" has {json.dumps(call)[:80]}; a call is {{"type": "function", "function": {{"name": '
            '"...", "arguments": {...}}}'
        )
    arguments = _parsed(function.get("arguments"), "arguments", dict, where)
    function = {**function, "arguments": {} if arguments is None else arguments}
    return {**call, "function": function} if "function" in call else function


def _without_nulls(value: Any) -> Any:
    """Without keys that have no value, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _parsed(value: Any, key: str, kind: type, where: str) -> Any:
    """A list or an object, also one that is written as a text of JSON; None where there is none."""
    if value is None or value == "":
        return None
    parsed = _json_value(value, key, where) if isinstance(value, str) else value
    if not isinstance(parsed, kind):
        raise DataError(
            f'{where}: "{key}" must be {"a list" if kind is list else "an object"}, or a text of JSON that is one'
        )
    return parsed


def _json_value(text: str, key: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where}: "{key}" is a text that is no JSON: {error}') from error
