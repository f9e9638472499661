"""Samples of supervised training (a question, its positive passage, negatives), from DPR's files and mined ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from mt_core.config.fields import NonNegativeInt, PositiveInt, Section
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.ict import sample_random
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import Encode, TextDataConfig, TextSource, bare_encoder, build_from_text
from mt_data.preprocess.formats import open_text
from mt_retrieval.evidence import TextPairs, bare_question

# -- configuration, under Megatron's names -----------------------------------------------------------


class RefreshConfig(Section):
    """Hard negatives that are mined anew from each checkpoint while training continues."""

    evidence: str
    """The passages: a TSV file with the columns id, text and title, or the prefix of an indexed data set."""
    questions: str
    """The file of questions to mine for, one of data.data_path or data.train_data_path."""
    folder: str
    """Where embeddings and mined negatives are kept, which all ranks can read. A resumed run continues with it."""
    negatives: PositiveInt = 30
    """Hard negatives that are kept for each question."""
    every_checkpoints: PositiveInt = 1
    """Mine from every so many checkpoints (checkpoint.save_interval)."""
    in_background: bool = True
    """Train on while a process of its own mines; false waits for it, so that a run can be repeated exactly."""
    device: str = "cpu"
    """Where the process computes: cpu, cuda or auto."""


class DPRDataConfig(TextDataConfig):
    """Questions with positive_ctxs, negative_ctxs and hard_negative_ctxs from JSON files in the format of DPR."""

    dataset_type: str = "dpr"
    train_hard_neg: NonNegativeInt = 0
    """Negatives of each question in training: hard ones, and others where it has too few. The positives of the other
    questions of a micro-batch are negatives in any case."""
    val_av_rank_hard_neg: NonNegativeInt = 0
    """Hard negatives of each question in validation."""
    val_av_rank_other_neg: NonNegativeInt = 0
    """Other negatives of each question in validation."""
    refresh: RefreshConfig | None = None
    """Mine hard negatives anew during training; unset: those of the files."""

    @property
    def passages(self) -> int:
        """Number of passages of a question in training: the positive one and the hard negatives."""
        return 1 + self.train_hard_neg

    @model_validator(mode="after")
    def _check_refresh(self) -> DPRDataConfig:
        if self.refresh is not None and not self.train_hard_neg:
            raise ConfigError(
                "data.refresh mines hard negatives, and data.train_hard_neg=0 uses none; set it to at least 1"
            )
        return self


@dataclass(frozen=True)
class NegativeRules:
    """hard, other: negatives of each question. is_shuffled: drawn anew for each sample, with others in place of hard
    ones that a question lacks, as in training; else always the first ones."""

    hard: int
    other: int
    is_shuffled: bool

    @classmethod
    def of(cls, config: DPRDataConfig, request: SplitRequest) -> NegativeRules:
        if request.split == "train":
            return cls(config.train_hard_neg, 0, is_shuffled=True)
        return cls(config.val_av_rank_hard_neg, config.val_av_rank_other_neg, is_shuffled=False)


class DPRDataset:
    """Sample k is question `order[k]`. Its negatives depend on the seed, on k, and on what `mined` has for k."""

    def __init__(
        self,
        questions: Sequence[TrainingQuestion],
        order: NDArray[np.int64],
        rules: NegativeRules,
        pairs: TextPairs,
        encode: Encode,
        *,
        seed: int,
        name: str,
        mined: MinedNegatives | None = None,
    ) -> None:
        self.questions, self.order, self.rules, self.pairs = questions, order, rules, pairs
        self.encode, self.seed, self.name, self.mined = encode, seed, name, mined

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        question = self._question(index)
        query = self.pairs.question(self.encode(bare_question(question.question)))
        passages = [question.positives[0], *self.negatives(index)]
        present = len(passages)
        count = 1 + self.rules.hard + self.rules.other
        contexts = [self._passage(passage) for passage in passages]
        # CLS SEP: a passage without text fills the place, and context_mask leaves it out of the loss. Every sample has
        # the same shapes.
        contexts += [self.pairs.question([])] * (count - present)
        return {
            **{name: rows[0] for name, rows in self._padded("query", [query]).items()},
            **self._padded("context", contexts),
            "context_mask": (np.arange(count) < present).astype(np.int64),
            "loss_mask": np.array(1, np.float32),
        }

    def negatives(self, index: int) -> list[Context]:
        question = self._question(index)
        hard, other = list(question.hard_negatives), list(question.negatives)
        # Mined ones take the place of the file's.
        if self.mined is not None:
            hard = list(self.mined.of_sample(index, question.question, hard))
        if not self.rules.is_shuffled:
            return hard[: self.rules.hard] + other[: self.rules.other]
        # By sample: the same negatives whatever rank or worker reads it.
        random = sample_random(self.seed, index)
        # Hard ones in random order, then others, which fill up what hard ones lack.
        drawn = [negatives[place] for negatives in (hard, other) for place in random.permutation(len(negatives))]
        return drawn[: self.rules.hard]

    def describe(self, index: int) -> str:
        return f"{self.name}, question {self._question(index).question!r}"

    def fingerprint(self) -> str:
        """The content of the file."""
        return combined([asdict(question) for question in self.questions])

    def _question(self, index: int) -> TrainingQuestion:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return self.questions[int(self.order[index])]

    def _passage(self, passage: Context) -> list[int]:
        return self.pairs.passage(self.encode(passage.title), self.encode(passage.text))

    def _padded(self, name: str, rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int64]]:
        tokens = np.full((len(rows), self.pairs.length), self.pairs.pad, np.int64)
        seen = np.zeros_like(tokens)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
            seen[number, : len(row)] = 1
        return {
            f"{name}_tokens": tokens,
            f"{name}_tokentype_ids": np.zeros_like(tokens),
            f"{name}_padding_mask": seen,
        }


def build_dpr(config: DPRDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of DPR_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError for a file of another form, and when no question has as many negatives as the keys require.
    """
    pairs = TextPairs.of(tokenizer, request.sequence_length)
    encode = bare_encoder(tokenizer)
    rules = NegativeRules.of(config, request)
    refresh = config.refresh if request.split == "train" else None
    mined = None if refresh is None else MinedNegatives(Path(refresh.folder))

    def make(source: TextSource, num_samples: int | None) -> DPRDataset:
        questions = read_training_questions(Path(source.name))
        within = source.elements(len(questions), "questions")
        chosen = questions[within.start : within.stop]
        # Mined files decide the number later.
        if mined is None:
            _require_negatives(chosen, rules, source.name)
        order = epoch_order(len(chosen), num_samples, request.seed)
        return DPRDataset(chosen, order, rules, pairs, encode, seed=request.seed, name=source.name, mined=mined)

    return build_from_text(config, request, make)


def _require_negatives(questions: Sequence[TrainingQuestion], rules: NegativeRules, name: str) -> None:
    hard = max(len(question.hard_negatives) for question in questions)
    other = max(len(question.negatives) for question in questions)
    if rules.is_shuffled:
        limits = {"train_hard_neg": (rules.hard, hard + other)}
    else:
        limits = {"val_av_rank_hard_neg": (rules.hard, hard), "val_av_rank_other_neg": (rules.other, other)}
    for key, (wanted, most) in limits.items():
        if wanted > most:
            raise DataError(
                f"data.{key}={wanted}, and no question of {name} has more than {most} such negatives; set it to {most}"
            )


# -- questions with passages from DPR's JSON files ---------------------------------------------------
#
# A file is an array (or JSON lines) of objects with `question`, `positive_ctxs`, `negative_ctxs`, `hard_negative_ctxs`
# and `answers`; a passage has `title` and `text`, and may have `passage_id`. Files may be compressed (.gz, .zst).


NEGATIVES = ("hard_negative_ctxs", "negative_ctxs")


@dataclass(frozen=True, slots=True)
class Context:
    """id: as the file has it; None where it has none."""

    title: str
    text: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingQuestion:
    """positives: at least one."""

    question: str
    answers: tuple[str, ...]
    positives: tuple[Context, ...]
    hard_negatives: tuple[Context, ...]
    negatives: tuple[Context, ...]


def read_training_questions(path: Path) -> list[TrainingQuestion]:
    """Questions without a positive passage are left out, as DPR does.

    Raises DataError for a file that cannot be read or has no such questions, and for a record of another form.
    """
    questions = [
        _question(value, f"{path}, question {number}")
        for number, value in enumerate(_records(path), 1)
        if not isinstance(value, dict) or value.get("positive_ctxs") != []
    ]
    if not questions:
        raise DataError(f"{path} has no question with a passage in positive_ctxs")
    return questions


def _records(path: Path) -> list[Any]:
    """The JSON values of an array or of lines."""
    with open_text(path) as file:
        text = file.read()
    try:
        if text.lstrip()[:1] == "[":
            return list(json.loads(text))
        # Not splitlines: texts may have other line separators, such as U+2028.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON array or JSON lines: {error}") from error


def _question(value: Any, where: str) -> TrainingQuestion:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object with question and positive_ctxs")
    missing = [key for key in ("question", "positive_ctxs") if key not in value]
    if missing:
        raise DataError(f"{where} has no {' and no '.join(missing)}; its keys are {', '.join(value)}")
    if not isinstance(value["question"], str):
        raise DataError(f"{where}: question must be a text")
    answers = value.get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: answers must be a list of texts")
    positives, *negatives = (_contexts(value, key, where) for key in ("positive_ctxs", *NEGATIVES))
    return TrainingQuestion(value["question"], tuple(answers), positives, *negatives)


def _contexts(value: Mapping[str, Any], key: str, where: str) -> tuple[Context, ...]:
    contexts = value.get(key, [])
    if not isinstance(contexts, list):
        raise DataError(f"{where}: {key} must be a list of passages")
    return tuple(_context(context, f"{where}, {key} {number}") for number, context in enumerate(contexts, 1))


def _context(value: Any, where: str) -> Context:
    fields = [value.get(name) for name in ("title", "text")] if isinstance(value, dict) else [None]
    if not all(isinstance(field, str) for field in fields):
        raise DataError(f"{where} must have a title and a text")
    # DPR's files have one name or the other.
    number = value.get("passage_id", value.get("psg_id"))
    return Context(value["title"], value["text"], None if number is None else str(number))


# -- hard negatives mined during training: files in DPR's format, each from a sample on --------------
#
# `mined-000000012800.json` has the negatives of sample 12800 and those after it, until another file begins. Which file
# a sample takes does not depend on when it is read, so that a resumed run repeats its samples exactly.

NAME = re.compile(r"mined-(\d{12})\.json")


class MinedNegatives:
    """The files of a folder, which may be added to at any time, from samples on that nobody has read yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_sample(self, index: int, question: str, otherwise: Sequence[Context]) -> Sequence[Context]:
        """The hard negatives of a question that is sample `index`; `otherwise` while none are mined for it."""
        # The folder is listed for each sample, since files appear while training runs.
        begun = [first for first in self.first_samples() if first <= index]
        return _negatives(mined_file(self.folder, max(begun))).get(question, otherwise) if begun else otherwise

    def first_samples(self) -> list[int]:
        """First sample of each file, from which on it is used."""
        if not self.folder.is_dir():
            return []
        matches = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def mined_file(folder: Path, first_sample: int) -> Path:
    return folder / f"mined-{first_sample:012}.json"


def _negatives(path: Path) -> dict[str, tuple[Context, ...]]:
    # A later run of this process may have other files under the names.
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


# Two: around the sample at which a file begins, workers read both.
@lru_cache(maxsize=2)
def _read(path: Path, size: int, modified: int) -> dict[str, tuple[Context, ...]]:
    return {question.question: question.hard_negatives for question in read_training_questions(path)}
