"""Earlier messages of a conversation in the shape that a template reads: calls of tools, what they gave, reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_infer.chat.tool_calls.form import CallForm, any_id

Message = Mapping[str, Any]
FUNCTION, KEY, VALUE = "probe_function", "probe_key", "probe_value"
REASONING = "reasoning_content"


@dataclass(frozen=True)
class CallShape:
    """as_text: arguments are JSON as text, in place of an object. content: of a message that has calls and no text."""

    as_text: bool = False
    content: str | None = ""


SHAPES = (CallShape(), CallShape(as_text=True), CallShape(content=None), CallShape(as_text=True, content=None))
"""Shapes that templates are tried with, in this order."""


def probe_messages(shape: CallShape, form: CallForm | None) -> list[Message]:
    """A conversation with a call."""
    messages: list[Message] = [
        {"role": "user", "content": "question"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call1", "type": "function", "function": {"name": FUNCTION, "arguments": {KEY: VALUE}}}
            ],
        },
        {"role": "tool", "content": "result", "tool_call_id": "call1"},
    ]
    return shaped_history(messages, shape, None, form)


def is_written(text: str) -> bool:
    """Whether a template has written the call of the probe; as Python writes an object it is none."""
    return FUNCTION in text and KEY in text and VALUE in text and f"{{'{KEY}'" not in text


def shaped_history(
    messages: Sequence[Message], shape: CallShape, reasoning_key: str | None, form: CallForm | None
) -> list[Message]:
    """The messages as a template takes them. reasoning_key: the name under which it reads the reasoning of an answer,
    which is left out where it reads none."""
    ids = CallIds(form)
    shaped = [_shaped(message, shape, reasoning_key, ids) for message in messages]
    return list(_one_call_each(shaped)) if form is not None and form.one_call_a_message else shaped


@dataclass
class CallIds:
    """Ids of calls as the template writes them, and the functions, by the ids that the messages have."""

    form: CallForm | None
    known: dict[str, tuple[str, str]] = field(default_factory=dict)
    count: int = 0

    def add(self, call: Mapping[str, Any]) -> str | None:
        name, given_id = call["function"]["name"], call.get("id")
        make = any_id if self.form is None else self.form.call_id
        # A number where there is no id: the same messages are the same prompt.
        new = make(name, self.count, given_id or f"call{self.count}")
        self.count += 1
        if given_id:
            self.known[given_id] = (new, name)
        return new if given_id or make is not any_id else None


def _shaped(message: Message, shape: CallShape, reasoning_key: str | None, ids: CallIds) -> Message:
    shaped = {name: value for name, value in message.items() if name != REASONING}
    if reasoning_key is not None and message.get(REASONING):
        shaped[reasoning_key] = message[REASONING]
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_call(call, shape, ids) for call in message["tool_calls"]]
        shaped["content"] = shaped.get("content") or shape.content
        if ids.form is not None and ids.form.as_text is not None:
            shaped["content"] = f"{shaped['content'] or ''}{ids.form.as_text(_named(shaped.pop('tool_calls')))}"
    number = message.get("tool_call_id")
    if number in ids.known:
        shaped["tool_call_id"], name = ids.known[number]
        shaped.setdefault("name", name)
    return shaped


def _named(calls: Iterable[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Functions and arguments, which are objects."""
    functions = [call["function"] for call in calls]
    arguments = [function.get("arguments", {}) for function in functions]
    objects = [json.loads(value) if isinstance(value, str) else value for value in arguments]
    return [(function["name"], value) for function, value in zip(functions, objects, strict=True)]


def with_tools_of_system(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with the functions as a text in JSON in the system message, which is made where there is none."""
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _call(call: Mapping[str, Any], shape: CallShape, ids: CallIds) -> dict[str, Any]:
    identity = ids.add(call)
    arguments = call["function"].get("arguments", {})
    if shape.as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    shaped = {**call, "function": {**call["function"], "arguments": arguments}}
    return shaped if identity is None else {**shaped, "id": identity}


def _one_call_each(messages: Iterable[Message]) -> Iterator[Message]:
    """Each call in a message by itself, in the order of the calls, before what it gave."""
    calls: list[Message] = []
    results: list[Message] = []
    for message in messages:
        if message["role"] == "tool" and calls:
            results.append(message)
            continue
        yield from _with_results(calls, results)
        calls, results = (list(_divided(message)) if message.get("tool_calls") else []), []
        if not calls:
            yield message
    yield from _with_results(calls, results)


def _with_results(calls: Sequence[Message], results: Sequence[Message]) -> Iterator[Message]:
    numbers = [call["tool_calls"][0].get("id") for call in calls]
    # Results without the id of a call are those of the calls that have none by id, in their order.
    others = [result for result in results if result.get("tool_call_id") not in numbers]
    for number, call in zip(numbers, calls, strict=True):
        yield call
        by_id = [result for result in results if number is not None and result.get("tool_call_id") == number]
        yield from by_id or others[:1]
        others = others if by_id else others[1:]
    yield from others


def _divided(message: Message) -> Iterator[Message]:
    """The text and the reasoning are those of the first call; such templates take one of them."""
    thinking, content = message.get("thinking"), message.get("content")
    first = {**message, "thinking": f"{thinking}\n\n{content}", "content": ""} if thinking and content else message
    for number, call in enumerate(message["tool_calls"]):
        others = first if not number else {"role": message["role"], "content": ""}
        yield {**others, "tool_calls": [call]}
