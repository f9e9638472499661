"""Tool calls in the text of an answer: the forms that open models are trained on.

`hermes` (Nous Hermes, Qwen): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number after the content.
`llama3_json` (Llama 3.1 and later): the whole answer is `{"name": ..., "parameters": {...}}`, several with "; "
between, after `<|python_tag|>` or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mt_infer.detokenizer import length_of_beginning

Form = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


KEYS: Mapping[Form, str] = {"hermes": "arguments", "llama3_json": "parameters"}


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text."""

    name: str
    arguments: str


def form_of_template(source: str) -> Form | None:
    """The form in which a chat template has the model write calls, by its marks."""
    if OPEN in source:
        return "hermes"
    if PYTHON_TAG in source or ('"parameters"' in source and "ipython" in source):
        return "llama3_json"
    return None


def call_constraint(form: Form, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The SamplingParameters for an answer that is one call of one of the functions (OpenAI's objects: name, parameters
    as a JSON schema)."""
    schema = {"anyOf": [_call_schema(function, KEYS[form]) for function in functions]}
    if form == "llama3_json":
        return {"json_schema": schema}
    # The marks around the call are what Hermes templates write.
    return {"grammar": f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {json.dumps(schema)}'}


def offered_constraint(form: Form, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The SamplingParameters for an answer of any text and any calls, in which calls are of one of the functions, with
    the arguments of its `parameters` where it is strict."""
    # Calls of functions that are not strict may have any object as arguments.
    loose = ({**function, "parameters": None} for function in functions if not function.get("strict"))
    strict = (function for function in functions if function.get("strict"))
    schema = {"anyOf": [_call_schema(function, KEYS[form]) for function in (*strict, *loose)]}
    return {"grammar": f"{OFFERED[form]}\nSPACE: /[ \\n]{{1,8}}/\nobject: %json {json.dumps(schema)}"}


OFFERED: Mapping[Form, str] = {
    "hermes": rf"""start: TEXT | begin call (SPACE? "{OPEN}" call)* SPACE?
begin[lazy]: TEXT "{OPEN}"
call: SPACE? object SPACE? "{CLOSE}"
TEXT: /(.|\n)*/""",
    "llama3_json": rf"""start: TEXT? | "{PYTHON_TAG}"? object (";" SPACE? object)*
TEXT: /([^ \n{{<]|<[^|])(.|\n)*/""",
}
"""Any text without a call, or calls to the end. lazy: a mark begins a call as soon as it is there."""


def _call_schema(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object"}
    properties = {"name": {"const": function["name"]}, key: parameters}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


class ToolCallParser:
    """Divides the text of an answer, as it comes, into content and tool calls.

    Text that is no tool call after all is content: nothing of an answer is lost.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self._held = ""
        self._shown = False

    def add(self, text: str) -> str:
        """The content that is certain with this text."""
        self._held += text
        # What may turn out to be a call is held back: a client cannot take shown text back.
        keep = self._kept()
        content, self._held = self._held[:keep], self._held[keep:]
        self._shown = self._shown or bool(content)
        return content

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the content, and the calls."""
        calls = PARSERS[self.form](self._held)
        return ("", calls) if calls else (self._held, [])

    def _kept(self) -> int:
        """Characters of the held text that are content for certain."""
        if self.form == "hermes":
            return before_mark(self._held, OPEN)
        # Llama 3 writes a call as the whole answer: only its beginning decides.
        start = self._held.lstrip()
        begins_call = start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)
        return 0 if begins_call and not self._shown else len(self._held)


def before_mark(text: str, mark: str) -> int:
    """Characters of the text before the mark, or before what may be its beginning at the end."""
    found = text.find(mark)
    return found if found >= 0 else len(text) - length_of_beginning(mark, text)


def parse_hermes(text: str) -> list[ToolCall]:
    """Empty unless all of the text is calls."""
    rest, calls = text.strip(), []
    while rest:
        if not rest.startswith(OPEN):
            return []
        # The last call may lack its closing mark, where the answer ended by length or by a stop token.
        inside, _, rest = rest.removeprefix(OPEN).partition(CLOSE)
        call = _call(_object(inside), KEYS["hermes"])
        if call is None:
            return []
        calls.append(call)
        rest = rest.strip()
    return calls


def parse_llama3(text: str) -> list[ToolCall]:
    """Empty unless all of the text is calls."""
    rest, calls = text.strip().removeprefix(PYTHON_TAG), []
    decoder = json.JSONDecoder()
    while rest := rest.strip().removeprefix(";").lstrip():
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        # Some models write "arguments", as other forms do.
        call = _call(value, KEYS["llama3_json"]) or _call(value, "arguments")
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:]
    return calls


PARSERS: Mapping[Form, Callable[[str], list[ToolCall]]] = {"hermes": parse_hermes, "llama3_json": parse_llama3}


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, key: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
        return None
    return ToolCall(value["name"], json.dumps(value[key], ensure_ascii=False))
