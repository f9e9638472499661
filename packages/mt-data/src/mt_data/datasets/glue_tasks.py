"""GLUE's tasks: the columns of their files, their classes, and the metrics that are reported for them.

Wang et al., GLUE: a multi-task benchmark and analysis platform for natural language understanding (2019). The numbers
of MNLI's classes are Megatron's. Read whenever plugins are listed, so that nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Column = str | int
"""A column's name in the first line (a key of a JSON object), or its place from 0."""


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """One or two texts a line with a class or a number.

    labels: the classes in the order of their numbers; None: the label is a number to predict (regression). uid: None
    counts lines from 0. header: whether the first line of a file names the columns. test_columns: number and text, the
    only columns of a published test file that names them although the other files have no such line.
    """

    doc: str
    texts: tuple[Column, ...]
    label: Column
    labels: tuple[str, ...] | None
    uid: Column | None = None
    header: bool = True
    test_columns: tuple[str, str] | None = None
    metrics: tuple[str, ...] = ("accuracy",)


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
SENTENCES = ("sentence1", "sentence2")
GLUE: Mapping[str, TextTask] = {
    "mnli": TextTask(
        doc="Pairs of sentences from the files of MNLI: contradiction, entailment or neutral",
        texts=SENTENCES,
        label="gold_label",
        labels=("contradiction", "entailment", "neutral"),
        uid="index",
    ),
    "qqp": TextTask(
        doc="Pairs of questions from the files of QQP: duplicates or not",
        texts=("question1", "question2"),
        label="is_duplicate",
        labels=BINARY,
        uid="id",
        metrics=("accuracy", "f1"),
    ),
    "cola": TextTask(
        doc="Sentences from the files of CoLA: grammatical or not",
        # CoLA's files have four columns without a header: source, label, the author's mark, sentence.
        texts=(3,),
        label=1,
        labels=BINARY,
        header=False,
        test_columns=("index", "sentence"),
        metrics=("matthews",),
    ),
    "sst2": TextTask(
        doc="Sentences from the files of SST-2: sentiment", texts=("sentence",), label="label", labels=BINARY
    ),
    "mrpc": TextTask(
        doc="Pairs of sentences from the files of MRPC: paraphrases or not",
        texts=("#1 String", "#2 String"),
        label="Quality",
        labels=BINARY,
        metrics=("accuracy", "f1"),
    ),
    "stsb": TextTask(
        doc="Pairs of sentences from the files of STS-B: similarity from 0 to 5, a number to predict",
        texts=SENTENCES,
        label="score",
        labels=None,
        uid="index",
        metrics=("pearson", "spearman"),
    ),
    "qnli": TextTask(
        doc="Questions and sentences from the files of QNLI: answered or not",
        texts=("question", "sentence"),
        label="label",
        labels=ENTAILMENT,
        uid="index",
    ),
    "rte": TextTask(
        doc="Pairs of sentences from the files of RTE: entailment or not",
        texts=SENTENCES,
        label="label",
        labels=ENTAILMENT,
        uid="index",
    ),
    "wnli": TextTask(
        doc="Pairs of sentences from the files of WNLI: entailment or not",
        texts=SENTENCES,
        label="label",
        labels=BINARY,
        uid="index",
    ),
}
"""By data.dataset_type."""
