"""Samples of supervised training: a question, its positive passage, and negatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.epochs import epoch_order
from mt_data.datasets.fingerprints import combined
from mt_data.datasets.ict import sample_random
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.text_files import Encode, TextSource, bare_encoder, build_from_text
from mt_retrieval.dpr.config import DPRDataConfig
from mt_retrieval.dpr.files import Context, TrainingQuestion, read_training_questions
from mt_retrieval.dpr.mined import MinedNegatives
from mt_retrieval.text_pairs import TextPairs, bare_question


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
        found = {"train_hard_neg": (rules.hard, hard + other)}
    else:
        found = {"val_av_rank_hard_neg": (rules.hard, hard), "val_av_rank_other_neg": (rules.other, other)}
    for key, (wanted, most) in found.items():
        if wanted > most:
            raise DataError(
                f"data.{key}={wanted}, and no question of {name} has more than {most} such negatives; set it to {most}"
            )
