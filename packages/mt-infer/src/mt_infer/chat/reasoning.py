"""What a model thinks before it answers: the marks around it, which a chat template shows."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningMarks:
    """open, close: around the reasoning, at the beginning of an answer. answer: around what is said after it, in models
    that mark that too."""

    open: str
    close: str
    answer: tuple[str, str] | None = None


THINK = ReasoningMarks("<think>", "</think>")
MARKS = (
    ReasoningMarks("<mm:think>", "</mm:think>"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<longcat_think>", "</longcat_think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<|channel>thought\n", "<channel|>"),
)
ANSWER_MARKS = (("<response>", "</response>"), ("<answer>", "</answer>"))
KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read the reasoning of an assistant's message, the usual one first."""


def reasoning_of_template(source: str) -> ReasoningMarks | None:
    """The marks of a chat template; None for one that knows no reasoning."""
    for marks in MARKS:
        if marks.close in source and marks.open.strip() in source:
            return marks
    if THINK.close not in source:
        return None
    answer = next((pair for pair in ANSWER_MARKS if pair[0] in source and pair[1] in source), None)
    return ReasoningMarks(THINK.open, THINK.close, answer)


def reasoning_key(source: str) -> str | None:
    """The name under which a template reads the reasoning of a message; None where it reads none."""
    for key in KEYS:
        if re.search(rf"""(?:\.|\[\s*['"]|\.get\(\s*['"]|['"]){key}\b""", source):
            return key
    return None


def is_open(prompt: str, marks: ReasoningMarks) -> bool:
    """Whether a prompt ends within the reasoning: the template has opened it."""
    return prompt.rstrip().endswith(marks.open.rstrip())
