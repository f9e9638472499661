"""Records of answers in steps: prompt, completions and labels, in TRL's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.errors import DataError
from mt_data.datasets.sft.conversations import place
from mt_data.preprocess.readers import Record

PROMPT, STEPS, LABELS = "prompt", "completions", "labels"


@dataclass(frozen=True)
class SteppedAnswer:
    """labels: of each step, whether it is right."""

    prompt: str
    steps: list[str]
    labels: list[bool]
    file: str
    line: int

    @property
    def where(self) -> str:
        return place(self.file, self.line)


class ProcessReader:
    """Turns the records of one file into answers in steps (the interface of RecordReader)."""

    format = "process_reward"

    def example(self, record: Record) -> SteppedAnswer:
        """Raises DataError, naming the record, for one without the three keys, and for one of them that cannot be."""
        where, fields = place(record.file, record.line), record.value
        if missing := [key for key in (PROMPT, STEPS, LABELS) if key not in fields]:
            raise DataError(
                f'{where} has no key "{missing[0]}"; its keys are {", ".join(fields)}. A record has prompt, '
                "completions (a list of steps) and labels (true or false of each step)"
            )
        prompt, steps, labels = fields[PROMPT], fields[STEPS], fields[LABELS]
        if not isinstance(prompt, str) or not prompt:
            raise DataError(f'{where}: "prompt" must be a text that is not empty; it is {prompt!r:.60}')
        _require_list(steps, STEPS, str, "texts that are not empty", where)
        _require_list(labels, LABELS, bool, "true or false", where)
        if len(steps) != len(labels):
            raise DataError(
                f'{where}: "completions" has {len(steps)} steps and "labels" {len(labels)}; they are as many'
            )
        return SteppedAnswer(prompt, steps, labels, record.file, record.line)


def _require_list(values: Any, key: str, kind: type, what: str, where: str) -> None:
    if not isinstance(values, list) or not values:
        raise DataError(f'{where}: "{key}" must be a list with an entry for each step; it is {values!r:.60}')
    wrong = [value for value in values if not isinstance(value, kind) or value == ""]
    if wrong:
        raise DataError(f'{where}: "{key}" has {wrong[0]!r:.60}; its entries must be {what}')
