"""Sentence-pair classification from the tab-separated files of GLUE: MNLI and QQP.

Columns are found by the names in the first line. A quotation mark is an ordinary character, as these files
mean it. A file without the label column is a test set: its labels are -1 and do not count in the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.epochs import epoch_order
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.pair_encoding import PairRules, Truncation, clean_text, encode_pair
from mt_data.datasets.text_files import Encode, TextDataConfig, TextSource, bare_encoder, build_from_text
from mt_data.preprocess.readers import expand_globs

NO_LABEL = -1
_LISTED = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairTask:
    """Names of the columns, and the number of each label."""

    uid: str
    a: str
    b: str
    label: str
    labels: Mapping[str, int]


TASKS = {
    "mnli": PairTask(
        "index", "sentence1", "sentence2", "gold_label", {"contradiction": 0, "entailment": 1, "neutral": 2}
    ),
    "qqp": PairTask("id", "question1", "question2", "is_duplicate", {"0": 0, "1": 1}),
}
"""By data.dataset_type."""


class SentencePairDataConfig(TextDataConfig):
    """Tab-separated files; each prefix is a file, or a pattern. The task is named by dataset_type."""

    dataset_type: str = "mnli"
    truncation: Truncation = "right"
    """What is cut when a pair is too long: the end of the whole, as Megatron does, or the longer text."""
    on_error: Literal["raise", "skip"] = "raise"
    """A line that does not fit the columns, lacks a text or has an unknown label is an error, or is left
    out, counted and listed."""


@dataclass(frozen=True)
class Pair:
    """One line of a file. label is -1 when the file has no labels."""

    uid: int
    a: str
    b: str
    label: int
    where: str


class SentencePairDataset:
    """Sample k is pair `order[k]`."""

    def __init__(
        self, pairs: list[Pair], order: NDArray[np.int64], encode: Encode, rules: PairRules, name: str
    ) -> None:
        self.pairs = pairs
        self.order = order
        self.encode = encode
        self.rules = rules
        self.name = name

    def __len__(self) -> int:
        return len(self.order)

    def pair(self, index: int) -> Pair:
        """The pair of sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return self.pairs[int(self.order[index])]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        pair = self.pair(index)
        return {
            **encode_pair(self.encode(pair.a), self.encode(pair.b), self.rules),
            "labels": np.array(pair.label, np.int64),
            "loss_mask": np.array(pair.label != NO_LABEL, np.float32),
            "uid": np.array(pair.uid, np.int64),
        }

    def describe(self, index: int) -> str:
        return self.pair(index).where


def build_sentence_pair(config: SentencePairDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of SENTENCE_PAIR_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError for unusable lines and for a file without labels in another split than test.
    """
    if config.dataset_type not in TASKS:
        raise ConfigError(
            f'data.dataset_type="{config.dataset_type}" must be one of {", ".join(TASKS)} to read sentence pairs'
            f"{did_you_mean(config.dataset_type, TASKS)}"
        )
    task = TASKS[config.dataset_type]
    rules = PairRules.of(tokenizer, request.sequence_length, config.truncation, config.dataset_type)
    encode = bare_encoder(tokenizer)

    def make(source: TextSource, num_samples: int | None) -> SentencePairDataset:
        pairs = read_all(expand_globs([source.name]), task, config.on_error)
        within = source.elements(len(pairs), "lines")
        chosen = pairs[within.start : within.stop]
        _check_labels(chosen, task, request)
        return SentencePairDataset(
            chosen, epoch_order(len(chosen), num_samples, request.seed), encode, rules, source.name
        )

    return build_from_text(config, request, make)


def _check_labels(pairs: list[Pair], task: PairTask, request: SplitRequest) -> None:
    if request.split != "test" and (unlabelled := [pair for pair in pairs if pair.label == NO_LABEL]):
        raise DataError(
            f'{unlabelled[0].where}: the file has no column "{task.label}", so it is a test set; name it with '
            f"data.test_data_path, and for the {request.split} split a file with labels"
        )


def read_all(paths: list[Path], task: PairTask, on_error: str) -> list[Pair]:
    """All pairs of some files, in order; with on_error "skip" bad lines are counted and the first listed."""
    pairs: list[Pair] = []
    bad: list[str] = []
    for path in paths:
        for pair in read_pairs(path, task):
            if isinstance(pair, Pair):
                pairs.append(pair)
            elif on_error == "raise":
                raise DataError(f'{pair}; correct the line, or leave such lines out with data.on_error="skip"')
            else:
                bad.append(pair)
    if bad:
        log.warning("left out %d lines, the first: %s", len(bad), "; ".join(bad[:_LISTED]))
    return pairs


def read_pairs(path: Path, task: PairTask) -> Iterator[Pair | str]:
    """The pairs of a file, and for a line that is none what is wrong with it.

    Raises DataError when a column is missing or the file is no UTF-8 text.
    """
    lines = _lines(path)
    _, first = next(lines, (0, ""))
    columns = [name.strip() for name in first.split("\t")]
    missing = [name for name in (task.uid, task.a, task.b) if name not in columns]
    if missing:
        raise DataError(
            f"{path}, line 1: there is no column {', '.join(missing)}; the first line must name the columns "
            f"{task.uid}, {task.a}, {task.b} and, but for a test set, {task.label}, separated by tabs. "
            f"It names {', '.join(columns)}"
        )
    for number, line in lines:
        yield _parse(line.split("\t"), columns, task, f"{path}, line {number}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                number += 1
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read behind line {number}: {error}") from error


def _parse(fields: list[str], columns: list[str], task: PairTask, where: str) -> Pair | str:
    if len(fields) != len(columns):
        return f"{where}: {len(fields)} fields, the first line names {len(columns)} columns"
    row = {name: field.strip() for name, field in zip(columns, fields, strict=True)}
    if not row[task.uid].isdecimal():
        return f"{where}: {task.uid} is {row[task.uid]!r}, which is no number"
    a, b = clean_text(row[task.a]), clean_text(row[task.b])
    if not a or not b:
        return f"{where}: {task.a if not a else task.b} is empty"
    if task.label not in row:
        return Pair(int(row[task.uid]), a, b, NO_LABEL, where)
    label = row[task.label]
    if label not in task.labels:
        return f"{where}: {task.label} is {label!r}, known are {', '.join(task.labels)}"
    return Pair(int(row[task.uid]), a, b, task.labels[label], where)
