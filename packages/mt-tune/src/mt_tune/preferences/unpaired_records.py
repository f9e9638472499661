"""Records of single answers: prompt, completion and label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.errors import DataError
from mt_data.datasets.sft.conversations import place
from mt_data.datasets.sft.record_formats import PROMPT_COMPLETION, Example, RecordReader
from mt_data.preprocess.readers import Record

PROMPT, COMPLETION, LABEL = "prompt", "completion", "label"


@dataclass(frozen=True)
class LabelledExample:
    """An answer, and whether it is desirable."""

    answer: Example
    desirable: bool

    @property
    def line(self) -> int:
        return self.answer.line

    @property
    def where(self) -> str:
        return self.answer.where


class UnpairedReader:
    """Turns the records of one file into labelled answers (the interface of RecordReader).

    Prompts and completions are texts, or lists of messages; a completion may be a text to a prompt of messages.
    """

    format = "unpaired_preference"

    def __init__(self) -> None:
        self._answers = RecordReader(PROMPT_COMPLETION)

    def example(self, record: Record) -> LabelledExample:
        """Raises DataError, naming the record, for one without the three keys, and for one of them that cannot be."""
        where, fields = place(record.file, record.line), record.value
        if missing := [key for key in (PROMPT, COMPLETION, LABEL) if key not in fields]:
            raise DataError(
                f'{where} has no key "{missing[0]}"; its keys are {", ".join(fields)}. A record has prompt, completion '
                "and label (true: desirable); pairs of a chosen and a rejected answer are trained by mt tune dpo"
            )
        label = fields[LABEL]
        if not isinstance(label, bool):
            raise DataError(f'{where}: "label" is {label!r}; it must be true (desirable) or false')
        prompt, completion = _parts(fields[PROMPT], fields[COMPLETION], where)
        answer = self._answers.example(Record({PROMPT: prompt, COMPLETION: completion}, record.file, record.line))
        return LabelledExample(answer, label)


def _parts(prompt: Any, completion: Any, where: str) -> tuple[Any, Any]:
    if not prompt:
        raise DataError(f'{where}: "prompt" is empty; an answer is desirable to something')
    if isinstance(prompt, list) and isinstance(completion, str):
        return prompt, [{"role": "assistant", "content": completion}]
    return prompt, [completion] if isinstance(completion, dict) else completion
