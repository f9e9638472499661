"""Records of preferences: a prompt with a chosen and a rejected answer.

explicit    prompt, chosen, rejected: texts, or lists of messages
implicit    chosen, rejected: whole texts or conversations, whose common beginning is the prompt
sharegpt    conversations (the prompt) as {from, value}, chosen and rejected as one turn each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.errors import DataError
from mt_data.datasets.sft.conversations import place
from mt_data.datasets.sft.record_formats import PROMPT_COMPLETION, SPEAKERS, Example, RecordReader
from mt_data.preprocess.readers import Record

CHOSEN, REJECTED, PROMPT = "chosen", "rejected", "prompt"


@dataclass(frozen=True)
class PairExample:
    """A chosen and a rejected answer to one prompt; margin: by how much the chosen one is better, if it is said."""

    chosen: Example
    rejected: Example
    margin: float

    @property
    def line(self) -> int:
        return self.chosen.line

    @property
    def where(self) -> str:
        return self.chosen.where


class PairReader:
    """Turns the records of one file into pairs (the interface of RecordReader)."""

    format = "preference"

    def __init__(self) -> None:
        self._answers = RecordReader(PROMPT_COMPLETION)

    def example(self, record: Record) -> PairExample:
        """Raises DataError, naming the record, for one that is no pair, or of which both answers are the same."""
        where, fields = place(record.file, record.line), record.value
        for key in (CHOSEN, REJECTED):
            if key not in fields:
                raise DataError(
                    f'{where} has no key "{key}"; its keys are {", ".join(fields)}. A record has prompt, chosen and '
                    "rejected, or chosen and rejected as whole conversations"
                )
        prompt, chosen, rejected = _parts(fields, where)
        if chosen == rejected:
            raise DataError(f"{where}: the chosen and the rejected answer are the same; remove the record")
        answers = [
            self._answer(record, prompt, answer, key) for answer, key in ((chosen, CHOSEN), (rejected, REJECTED))
        ]
        return PairExample(answers[0], answers[1], _margin(fields, where))

    def _answer(self, record: Record, prompt: Any, answer: Any, key: str) -> Example:
        try:
            return self._answers.example(Record({"prompt": prompt, "completion": answer}, record.file, record.line))
        except DataError as error:
            raise DataError(str(error).replace('"completion"', f'"{key}"')) from error


def _parts(fields: Mapping[str, Any], where: str) -> tuple[Any, Any, Any]:
    chosen, rejected = (_messages(fields[key]) for key in (CHOSEN, REJECTED))
    turns = fields.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]:
        return _messages(turns), _as_list(chosen), _as_list(rejected)
    if PROMPT in fields:
        prompt = fields[PROMPT]
        if not prompt:
            raise DataError(f'{where}: "prompt" is empty; a preference is one between answers to something')
        # Answers as texts to a prompt of messages, and the reverse.
        if isinstance(prompt, list):
            return prompt, _as_list(_spoken(chosen)), _as_list(_spoken(rejected))
        if isinstance(chosen, list) and isinstance(prompt, str):
            return [{"role": "user", "content": prompt}], _answer_alone(chosen, prompt), _answer_alone(rejected, prompt)
        return prompt, chosen, rejected
    return _common_beginning(chosen, rejected, where)


def _answer_alone(messages: Any, prompt: str) -> Any:
    """Without the prompt, which some data sets repeat at the beginning of both conversations."""
    repeated = isinstance(messages, list) and len(messages) > 1 and messages[0].get("content") == prompt
    return messages[1:] if repeated else messages


def _common_beginning(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise DataError(
            f'{where}: "chosen" and "rejected" must both be texts, or both be lists of messages; they are '
            f"{type(chosen).__name__} and {type(rejected).__name__}"
        )
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    # A space belongs to the word behind it.
    if isinstance(chosen, str) and common and chosen[common - 1] == " ":
        common -= 1
    if common == 0:
        raise DataError(
            f'{where}: "chosen" and "rejected" have no common beginning, which would be the prompt; add "prompt"'
        )
    return chosen[:common], chosen[common:], rejected[common:]


def _messages(value: Any) -> Any:
    """Turns of ShareGPT as messages; anything else as it is."""
    if isinstance(value, dict) and "from" in value:
        return {"role": SPEAKERS.get(value["from"], value["from"]), "content": value.get("value")}
    return [_messages(turn) for turn in value] if isinstance(value, list) else value


def _spoken(answer: Any) -> Any:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def _as_list(answer: Any) -> Any:
    return [answer] if isinstance(answer, dict) else answer


def _margin(fields: Mapping[str, Any], where: str) -> float:
    margin = fields.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < float("inf"):
        raise DataError(f'{where}: "margin" is {margin!r}; it must be a finite number')
    return float(margin)
