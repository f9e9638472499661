"""Constraints of an answer that is a call, or may have calls, in the form of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_infer.chat.reasoning import ReasoningMarks
from mt_infer.chat.tool_calls.form import CallForm, Function
from mt_infer.chat.tool_calls.grammar import SPACE, TEXT, GrammarWriter, SpecialId, either, no_special, quoted

START = re.compile(r"""("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/)|\bstart\b""")
"""The rule `start` of a grammar, where it is no part of a text or of an expression."""


@dataclass(frozen=True)
class AnswerBeginning:
    """What an answer may have before what is constrained. is_thinking: the prompt has opened the reasoning already.
    form: of calls, which may say how all answers are written."""

    reasoning: ReasoningMarks | None = None
    is_thinking: bool = False
    special_id: SpecialId = no_special
    form: CallForm | None = None

    def writer(self) -> GrammarWriter:
        return GrammarWriter(self.special_id)

    def thought(self, writer: GrammarWriter) -> str:
        """The reasoning, which may be missing unless it is opened."""
        if self.reasoning is None:
            return ""
        closed = f"{writer.until(self.reasoning.close)} {SPACE}"
        return closed if self.is_thinking else f"({writer.mark(self.reasoning.open)} {closed})?"


NO_BEGINNING = AnswerBeginning()


def required_call(
    form: CallForm, functions: Sequence[Function], beginning: AnswerBeginning = NO_BEGINNING
) -> dict[str, Any]:
    """The SamplingParameters for an answer that is one call of one of the functions, behind the reasoning."""
    writer = beginning.writer()
    if form.frame is not None:
        return {"grammar": writer.grammar(form.frame.required(writer, functions))}
    calls = either(form.grammar(writer, function) for function in functions)
    if form.at_start:
        return {"grammar": writer.grammar(f"{beginning.thought(writer)} {calls}")}
    before, after = _section(form, writer)
    return {
        "grammar": writer.grammar(f"{beginning.thought(writer)} {before} {writer.mark(form.begin)} {calls} {after}")
    }


def offered_calls(
    form: CallForm, functions: Sequence[Function], beginning: AnswerBeginning = NO_BEGINNING
) -> dict[str, Any]:
    """The SamplingParameters for an answer of any text and any calls, in which calls are of one of the functions, with
    the arguments of its `parameters` where it is strict."""
    # Calls of functions that are not strict may have any object as arguments.
    offered = [function if function.get("strict") else {**function, "parameters": None} for function in functions]
    writer = beginning.writer()
    if form.frame is not None:
        return {"grammar": writer.grammar(form.frame.offered(writer, offered))}
    # Plain marks of reasoning that may be missing are a part of the text.
    thought = beginning.thought(writer) if beginning.is_thinking else ""
    calls = writer.rule(either(form.grammar(writer, function) for function in offered))
    body = _whole_answer(form, writer, calls) if form.at_start else _text_and_calls(form, writer, calls)
    return {"grammar": writer.grammar(f"{thought} ({body})")}


def _section(form: CallForm, writer: GrammarWriter) -> tuple[str, str]:
    if form.section is None:
        return "", ""
    return f"{writer.mark(form.section[0])} {SPACE}", f"{SPACE} {writer.mark(form.section[1])}"


def _text_and_calls(form: CallForm, writer: GrammarWriter, call: str) -> str:
    """Any text without a call, or calls to the end."""
    begin_mark, first = writer.mark(form.begin), (form.section or (form.begin,))[0]
    inner = f"{call} ({SPACE} {begin_mark} {call})*"
    if form.section is not None:
        inner = f"{SPACE} {begin_mark} {inner} {SPACE} {writer.mark(form.section[1])}"
    return f"{TEXT} | {writer.until(first)} {inner} {SPACE}"


def _whole_answer(form: CallForm, writer: GrammarWriter, call: str) -> str:
    first = re.escape(form.begin)
    tags = "".join(f"{writer.mark(mark)}? " for mark in form.also)
    return f'/[^ \\n{first}<](.|\\n)*/? | /<[^|](.|\\n)*/ | {tags}{call} (";" {SPACE} {call})*'


def behind_reasoning(constraint: Mapping[str, Any], beginning: AnswerBeginning) -> dict[str, Any]:
    """The constraint of an answer (json_schema, regex, choices or grammar), behind the reasoning that a model may write
    before it. What it replaces is None."""
    frame = None if beginning.form is None else beginning.form.frame
    if not constraint or (beginning.reasoning is None and frame is None):
        return dict(constraint)
    ((name, value),) = constraint.items()
    writer = beginning.writer()
    expression = "answer_itself" if name == "grammar" else _expression(name, value)
    start = f"{beginning.thought(writer)} {expression}" if frame is None else frame.answer(writer, expression)
    rules = f"\n{START.sub(lambda match: match[1] or 'answer_itself', value)}" if name == "grammar" else ""
    return {name: None, "grammar": writer.grammar(start) + rules}


def _expression(name: str, value: Any) -> str:
    if name == "json_schema":
        return f"%json {json.dumps(value, default=dict)}"
    if name == "choices":
        return either(map(quoted, value))
    # A slash would end the expression of Lark.
    return "/" + re.sub(r"(?<!\\)/", r"\\/", value) + "/"
