"""Classification and regression of one or two texts: GLUE's tasks, and files with columns that the user names."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.glue_tasks import GLUE, Column, TextTask
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.pair_encoding import PairRules, SequenceFormat, Truncation, clean_text, encode_pair
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import Encode, TextDataConfig, TextSource, bare_encoder, build_from_text
from mt_data.preprocess.readers import expand_globs


class LabelledTextConfig(TextDataConfig):
    """Files of labelled texts; each prefix is a file, or a pattern."""

    truncation: Truncation = "right"
    """What is cut when the texts are too long: the end of the whole, as Megatron does, or the longer text."""
    sequence_format: SequenceFormat = "cls_sep"
    """What stands around the texts: CLS A SEP B SEP, as BERT takes them, or BOS A EOD B EOD (BOS where the tokenizer
    has one), for decoders."""
    on_error: Literal["raise", "skip"] = "raise"
    """A line that does not fit the columns, lacks a text or has an unknown label is an error, or is left
    out, counted and listed."""

    @property
    def task(self) -> TextTask:
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """1 stands for a number to predict."""
        return 1 if self.task.labels is None else len(self.task.labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.task.metrics


class GlueDataConfig(LabelledTextConfig):
    """GLUE's tab-separated files. The task is named by dataset_type."""

    dataset_type: str = "mnli"

    @property
    def task(self) -> TextTask:
        if self.dataset_type not in GLUE:
            raise ConfigError(
                f'data.dataset_type="{self.dataset_type}" must be one of {", ".join(GLUE)} to read files of GLUE'
                f"{did_you_mean(self.dataset_type, GLUE)}"
            )
        return GLUE[self.dataset_type]


class TextClassificationDataConfig(LabelledTextConfig):
    """Tab-separated files (.tsv, or any other suffix) and JSON lines (.jsonl) with columns of any name."""

    dataset_type: str = "text_classification"
    text_columns: list[Column] = Field(default_factory=lambda: list[Column](["text"]))
    """One or two columns of texts, by name or by place from 0."""
    label_column: Column = "label"
    """The column of the label. A file without it is a test set."""
    uid_column: Column | None = None
    """A column with a number for each line, which predictions carry. null counts the lines from 0."""
    labels: list[str] | None = None
    """The classes, in the order of their numbers. null: labels are numbers to predict (regression)."""
    header: bool = True
    """Whether the first line of a tab-separated file names the columns."""

    @model_validator(mode="after")
    def _check_columns(self) -> TextClassificationDataConfig:
        if not 1 <= len(self.text_columns) <= 2:
            raise ConfigError(f"data.text_columns={self.text_columns} must name one column, or two for pairs of texts")
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) < len(self.labels)):
            raise ConfigError(f"data.labels={self.labels} must be two or more different classes")
        named = [
            column for column in (*self.text_columns, self.label_column, self.uid_column) if isinstance(column, str)
        ]
        if not self.header and named:
            raise ConfigError(
                f"data.header=false: no line names the columns, and {', '.join(named)} is a name; give places from 0 "
                "in data.text_columns, data.label_column and data.uid_column"
            )
        return self

    @property
    def task(self) -> TextTask:
        return TextTask(
            doc="",
            texts=tuple(self.text_columns),
            label=self.label_column,
            labels=None if self.labels is None else tuple(self.labels),
            uid=self.uid_column,
            header=self.header,
            metrics=("pearson", "spearman") if self.labels is None else ("accuracy",),
        )


class TextClassificationDataset:
    """Sample k is line `order[k]`."""

    def __init__(
        self,
        lines: list[LabelledTexts],
        order: NDArray[np.int64],
        encode: Encode,
        rules: PairRules,
        task: TextTask,
        name: str,
    ) -> None:
        self.lines = lines
        self.order = order
        self.encode = encode
        self.rules = rules
        self.label_type = np.dtype(np.float32 if task.labels is None else np.int64)
        self.name = name

    def __len__(self) -> int:
        return len(self.order)

    def line(self, index: int) -> LabelledTexts:
        """The line of sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return self.lines[int(self.order[index])]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        line = self.line(index)
        first, *second = (self.encode(text) for text in line.texts)
        return {
            **encode_pair(first, second[0] if second else None, self.rules),
            # int64 for classes, float32 for regression; without a label the loss mask is 0 and the value has no effect.
            "labels": np.array(NO_LABEL if line.label is None else line.label, self.label_type),
            "loss_mask": np.array(line.label is not None, np.float32),
            "uid": np.array(line.uid, np.int64),
        }

    def fingerprint(self) -> str:
        """The texts and labels."""
        return combined([[line.uid, *line.texts, line.label] for line in self.lines])

    def describe(self, index: int) -> str:
        return self.line(index).where


def build_text_classification(config: LabelledTextConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of TEXT_CLASSIFICATION_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError for unusable lines and for a file without labels in another split than test.
    """
    task = config.task
    rules = _rules(config, tokenizer, request.sequence_length)
    encode = bare_encoder(tokenizer)

    def make(source: TextSource, num_samples: int | None) -> TextClassificationDataset:
        lines = read_all(expand_globs([source.name]), task, config.on_error)
        within = source.elements(len(lines), "lines")
        chosen = lines[within.start : within.stop]
        _check_labels(chosen, task, request)
        order = epoch_order(len(chosen), num_samples, request.seed)
        return TextClassificationDataset(chosen, order, encode, rules, task, source.name)

    return build_from_text(config, request, make)


def unlabelled_texts(
    texts: Sequence[str], config: LabelledTextConfig, tokenizer: Tokenizer
) -> TextClassificationDataset:
    """Single texts in memory as samples of a test set, in their order. config: of a task of single texts."""
    assert len(config.task.texts) == 1
    lines = [LabelledTexts(uid, (clean_text(text).strip(),), None, f"text {uid}") for uid, text in enumerate(texts)]
    rules = _rules(config, tokenizer, config.seq_length)
    order = np.arange(len(lines))
    return TextClassificationDataset(lines, order, bare_encoder(tokenizer), rules, config.task, "the texts")


def _rules(config: LabelledTextConfig, tokenizer: Tokenizer, length: int) -> PairRules:
    return PairRules.of(tokenizer, length, config.truncation, config.dataset_type, config.sequence_format)


def _check_labels(lines: list[LabelledTexts], task: TextTask, request: SplitRequest) -> None:
    if request.split != "test" and (unlabelled := [line for line in lines if line.label is None]):
        raise DataError(
            f'{unlabelled[0].where}: the file has no column "{task.label}", so it is a test set; name it with '
            f"data.test_data_path, and for the {request.split} split a file with labels"
        )


# -- labelled texts from tab-separated files and JSON lines ------------------------------------------
#
# A quotation mark is an ordinary character of a tab-separated file, as GLUE's files mean it. A file without the label
# column is a test set.

NO_LABEL = -1
INT64_DIGITS = 18
"""Numbers of so many digits are int64, the dtype of the numbers of lines."""
_LISTED = 5
log = logging.getLogger(__name__)

Row = Mapping[Column, str]


@dataclass(frozen=True)
class LabelledTexts:
    """One line of a file. label: number of the class, or the number to predict; None when the file has no labels."""

    uid: int
    texts: tuple[str, ...]
    label: float | None
    where: str


def read_all(paths: Sequence[Path], task: TextTask, on_error: str) -> list[LabelledTexts]:
    """All lines of some files, in order; with on_error "skip" bad lines are counted and the first listed.

    Raises DataError for a bad line, a missing column, and a file that is no UTF-8 text.
    """
    texts: list[LabelledTexts] = []
    bad: list[str] = []
    for path in paths:
        for line in read_file(path, task):
            if isinstance(line, LabelledTexts):
                texts.append(line)
            elif on_error == "raise":
                raise DataError(f'{line}; correct the line, or leave such lines out with data.on_error="skip"')
            else:
                bad.append(line)
    if bad:
        log.warning("left out %d lines, the first: %s", len(bad), "; ".join(bad[:_LISTED]))
    return texts


def read_file(path: Path, task: TextTask) -> Iterator[LabelledTexts | str]:
    """The lines of a file, and for one that cannot be used what is wrong with it."""
    if path.suffix != ".jsonl":
        task = _task_of_file(path, task)
    rows = _json_rows(path, task) if path.suffix == ".jsonl" else _tabbed_rows(path, task)
    for index, (row, where) in enumerate(rows):
        yield row if isinstance(row, str) else _parse(row, index, task, where)


def _json_rows(path: Path, task: TextTask) -> Iterator[tuple[Row | str, str]]:
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        if line.strip():
            yield _json_row(line, task, where), where


def _json_row(line: str, task: TextTask, where: str) -> Row | str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return f"{where}: not JSON ({error.msg})"
    except ValueError as error:  # an integer of more digits than Python converts
        return f"{where}: {error}"
    except RecursionError:
        return f"{where}: JSON nested too deeply"
    if not isinstance(value, dict):
        return f"{where}: must be an object with the keys {_listed(task.texts)}"
    row = {key: _as_text(field) for key, field in value.items() if field is not None}
    return _missing_columns(row, row, task, where) or row


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _task_of_file(path: Path, task: TextTask) -> TextTask:
    """The task with the columns of its published test file, where the file is that one."""
    _, first = next(_lines(path), (0, ""))
    if task.test_columns is None or tuple(first.split("\t")) != task.test_columns:
        return task
    number, text = task.test_columns
    # By name: the place of the label in the other files is that of the text here.
    return replace(task, uid=number, texts=(text,), label="label", header=True)


def _tabbed_rows(path: Path, task: TextTask) -> Iterator[tuple[Row | str, str]]:
    lines = ((number, line.split("\t")) for number, line in _lines(path))
    _, first = next(lines, (0, [""]))
    names = [name.strip() for name in first] if task.header else []
    places = range(len(first))
    problem = _missing_columns([*places, *names], names or places, task, f"{path}, line 1")
    if problem is not None:
        raise DataError(problem)
    # The first line was read to count the columns; without a header it is a row too.
    if not task.header:
        yield dict(enumerate(first)), f"{path}, line 1"
    for number, fields in lines:
        where = f"{path}, line {number}"
        if len(fields) != len(first):
            yield (
                f"{where}: {len(fields)} fields, the first line {'names' if names else 'has'} {len(first)} columns",
                where,
            )
        else:
            # By place and by name: tasks name their columns either way. Without a header `names` is empty.
            yield {**dict(enumerate(fields)), **dict(zip(names, fields, strict=False))}, where


def _missing_columns(columns: Iterable[Column], names: Iterable[Column], task: TextTask, where: str) -> str | None:
    """What is wrong with the columns; None: nothing. columns: by name and by place. names: those that are listed."""
    required = [column for column in (task.uid, *task.texts) if column is not None]
    has = set(columns)
    missing = [column for column in required if column not in has]
    if not missing:
        return None
    return (
        f"{where}: there is no column {_listed(missing)}; the columns must be {_listed(required)} and, but for a test "
        f"set, {task.label}. They are {_listed(names)}"
    )


def _listed(columns: Iterable[Column]) -> str:
    return ", ".join(map(str, columns))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        # newline="\n": a lone carriage return within a text must not end the line.
        with path.open(encoding="utf-8-sig", newline="\n") as file:  # MRPC's files begin with a byte-order mark
            for line in file:
                number += 1
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read behind line {number}: {error}") from error


def _parse(row: Row, index: int, task: TextTask, where: str) -> LabelledTexts | str:
    uid = str(index) if task.uid is None else row[task.uid].strip()
    if not uid.isdecimal() or len(uid) > INT64_DIGITS:
        return f"{where}: {task.uid} is {uid!r}, which is no number of at most {INT64_DIGITS} digits"
    texts = tuple(clean_text(row[column]).strip() for column in task.texts)
    if "" in texts:
        return f"{where}: {task.texts[texts.index('')]} is empty"
    label = row.get(task.label)
    if label is None:
        return LabelledTexts(int(uid), texts, None, where)
    number = _number_of(label.strip(), task)
    if number is None:
        legal = "it must be a number" if task.labels is None else f"known are {', '.join(task.labels)}"
        return f"{where}: {task.label} is {label.strip()!r}, {legal}"
    return LabelledTexts(int(uid), texts, number, where)


def _number_of(label: str, task: TextTask) -> float | None:
    """Number of the class, or the label itself; None for a label that the task does not have."""
    if task.labels is not None:
        return task.labels.index(label) if label in task.labels else None
    try:
        number = float(label)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
