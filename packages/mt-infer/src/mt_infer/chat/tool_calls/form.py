"""What a form of tool calls is, how plugins register one, and which one a chat template asks for.

A form is recognized by texts of the chat template, read from an answer as it comes, and written as a grammar that an
answer is held to.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mt_core.kinds import Kind, Lazy, Spec
from mt_core.plugins import PluginHost, load_plugins

if TYPE_CHECKING:
    from mt_infer.chat.tool_calls.grammar import GrammarWriter

Function = Mapping[str, Any]
"""OpenAI's object: name, parameters as a JSON schema, strict."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by its name."""


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text. id: the model's own; None where the form has none."""

    name: str
    arguments: str
    id: str | None = None


Reading = tuple[list[ToolCall], int]
"""Calls, and the characters that they take."""
ReadCalls = Callable[[str, Schemas, bool], Reading | None]
"""Reads the call at the beginning of a text, of which more may come unless the last argument says that it has ended;
None: there is no complete one."""
WriteCall = Callable[["GrammarWriter", Function], str]
"""The Lark expression of one call of a function, without `begin`."""
CallId = Callable[[str, int, str | None], str]
"""The id of a call, by its function, how many calls the conversation has before it, and the id that it had."""


def any_id(name: str, number: int, known: str | None) -> str:
    return known or f"call_{secrets.token_hex(12)}"


def nine_letters(name: str, number: int, known: str | None) -> str:
    """Mistral's templates refuse any other ids than nine letters and digits."""
    letters = re.sub(r"[^a-zA-Z0-9]", "", known or secrets.token_hex(5))
    return letters[-9:].rjust(9, "0")


def numbered_id(name: str, number: int, known: str | None) -> str:
    """Kimi's ids have the name of the function and count the conversation's calls."""
    return f"functions.{name}:{number}"


CallsAsText = Callable[[Sequence[tuple[str, Any]]], str]
"""The text of calls, by their functions and arguments."""

BodyKind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, kw_only=True)
class MessageFrame:
    """Answers that are messages, each of a header, a mark and a body.

    headers: texts with which a header may begin. message: the mark behind it. ends: marks that end a body. kind_of:
    what a body is, by its header, and the function that it calls. read: calls of such a body, by the function.
    required, offered: the grammar of an answer with a call of one of the functions, and of one that may have calls.
    answer: of one whose content is an expression.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]
    kind_of: Callable[[str], tuple[BodyKind, str]]
    read: Callable[[str, str, Schemas], list[ToolCall] | None]
    required: Callable[[GrammarWriter, Sequence[Function]], str]
    offered: Callable[[GrammarWriter, Sequence[Function]], str]
    answer: Callable[[GrammarWriter, str], str]
    start: str = "<|start|>"
    message: str = "<|message|>"


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a model writes calls of tools.

    begin: the mark that each call begins with. also: other marks that are read as one. then: texts of which one follows
    the mark, behind white space; empty: any text. section: marks around all calls of an answer; a call without them is
    read too. after: marks between and behind calls, which are no content. at_start: an answer with calls has nothing
    else, and `grammar` writes the mark too. stop: marks of the template with which the next turn begins, and which end
    an answer. one_call_a_message: the template writes a message's first call alone. as_text: the text of earlier calls,
    for a template that writes the texts of messages alone, and that reads the functions from the system message.
    """

    begin: str
    read: ReadCalls
    grammar: WriteCall
    also: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    section: tuple[str, str] | None = None
    after: tuple[str, ...] = ()
    at_start: bool = False
    stop: tuple[str, ...] = ()
    call_id: CallId = any_id
    one_call_a_message: bool = False
    as_text: CallsAsText | None = None
    frame: MessageFrame | None = None
    """The headers of messages, for answers that consist of them."""


@dataclass(frozen=True, kw_only=True)
class ToolCallFormSpec(Spec):
    """A form of tool calls. marks: groups of texts; a chat template that has all of a group has the model write calls
    in this form. Of several forms that fit, the one with the largest group is taken."""

    marks: tuple[tuple[str, ...], ...]
    form: Lazy[CallForm]


TOOL_CALL_FORMS = Kind("tool_call_forms", "a form of tool calls", ToolCallFormSpec, "mt-infer")


def form_of_template(source: str, host: PluginHost | None = None, name: str | None = None) -> CallForm | None:
    """The form that a chat template has the model write calls in, or that of this name; None for a template without
    calls. Raises PluginError for a name that is not registered."""
    if name is not None:
        spec: ToolCallFormSpec | None = registered_form(name, host)
    else:
        spec = spec_of_template(source, host)
    return None if spec is None else spec.form.load()


def registered_form(name: str, host: PluginHost | None = None) -> ToolCallFormSpec:
    """The form of --tool-call-form. Raises PluginError for one that is not registered."""
    return (host or load_plugins())[TOOL_CALL_FORMS].get(name, key="--tool-call-form")


def spec_of_template(source: str, host: PluginHost | None = None) -> ToolCallFormSpec | None:
    specs = list((host or load_plugins())[TOOL_CALL_FORMS])
    sizes = [max((len(group) for group in spec.marks if _has_all(source, group)), default=0) for spec in specs]
    # The first of those with the largest group.
    best = max(range(len(specs)), key=sizes.__getitem__, default=None)
    return None if best is None or not sizes[best] else specs[best]


def _has_all(source: str, texts: Sequence[str]) -> bool:
    return all(text in source for text in texts)
