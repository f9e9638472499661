"""Classification and regression of one or two texts: GLUE's tasks, and files with columns that the user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.epochs import epoch_order
from mt_data.datasets.fingerprints import combined
from mt_data.datasets.glue_tasks import GLUE, Column, TextTask
from mt_data.datasets.labelled_texts import NO_LABEL, LabelledTexts, read_all
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.pair_encoding import PairRules, SequenceFormat, Truncation, clean_text, encode_pair
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
