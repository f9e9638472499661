"""Samples for BERT: two stretches of sentences of one document, some of their words masked.

The order of samples and every value are Megatron's for the same seed, sizes and split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.masking import MaskedDataConfig, MaskingRules, SpanMasker, check_length, masking_rules
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.pair_encoding import special_ids
from mt_data.datasets.sentences import SentenceDataset, SentenceIndexPlan, SentenceSamples, build_sentence_datasets

NOT_PREDICTED = -1
"""Label of a position that is not masked."""
KEEP_PROBABILITY, MASK_PROBABILITY = 0.5, 0.8


_SPECIAL_PLACES = 3


class BertDataConfig(MaskedDataConfig):
    """Two stretches of sentences of one document, some words masked."""

    dataset_type: str = "bert"
    bert_binary_head: bool = True
    """A sample is a pair A and B, in half of all cases exchanged, which the second head predicts; false makes
    one stretch of text, also of documents with a single sentence."""


@dataclass(frozen=True)
class BertRules:
    """How sentences become a sample. pairs: A and B for the sentence-order task, else all of it is A."""

    sequence_length: int
    pairs: bool
    seed: int
    vocab_size: int
    cls: int
    sep: int
    mask: int
    pad: int
    masking: MaskingRules


class BertDataset(SentenceDataset):
    """Sample k is made of row k of the sentence index; its random numbers depend on seed + k only."""

    def __init__(self, samples: SentenceSamples, rules: BertRules) -> None:
        super().__init__(samples)
        self.rules = rules
        self._masker = SpanMasker(rules.masking)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        sentences, target = self.samples.sentences(index), self.samples.row(index)[2]
        # Every draw below is in Megatron's order: pivot, exchange, truncation, masking. Another order gives other
        # samples.
        random = np.random.RandomState((self.rules.seed + index) % 2**32)
        a, b, exchanged = split_pair(sentences, random) if self.rules.pairs else (_join(sentences), _join([]), False)
        whole = len(a) + len(b)
        a, b = truncate_pair(a, b, target, random)
        sample = self._masked(a, b, target, random)
        return sample | {
            "is_random": np.array(int(exchanged), np.int64),
            "truncated": np.array(int(len(a) + len(b) < whole), np.int64),
        }

    def _masked(
        self, a: np.ndarray, b: np.ndarray, target: int, random: np.random.RandomState
    ) -> dict[str, np.ndarray]:
        rules, length = self.rules, self.rules.sequence_length
        # B can be empty: without pairs, or when truncation removed all of it.
        end = [rules.sep] if len(b) else []
        # CLS A SEP B SEP, at most sequence_length ids
        true = np.concatenate([[rules.cls], a, [rules.sep], b, end]).astype(np.int64)
        tokens = np.full(length, rules.pad, np.int64)
        tokens[: len(true)] = true
        labels = np.full(length, NOT_PREDICTED, np.int64)
        for span in self._masker.spans(true, target, random):
            labels[span] = true[span]
            for position in span:
                tokens[position] = self._replacement(int(true[position]), random)
        places = np.arange(length)
        # B begins behind CLS, A and SEP.
        in_b = (places >= len(a) + 2) & (places < len(true))
        return {
            "tokens": tokens,
            "tokentype_ids": in_b.astype(np.int64),
            "labels": labels,
            "loss_mask": (labels != NOT_PREDICTED).astype(np.float32),
            "padding_mask": (places < len(true)).astype(np.int64),
        }

    def _replacement(self, token: int, random: np.random.RandomState) -> int:
        """The mask in 80 of 100 cases, any id of the vocabulary in 10, the token itself in 10."""
        if random.random_sample() < MASK_PROBABILITY:
            return self.rules.mask
        if random.random_sample() < KEEP_PROBABILITY:
            return token
        return int(random.randint(0, self.rules.vocab_size))


def split_pair(sentences: list[np.ndarray], random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray, bool]:
    """A and B on either side of a random boundary between sentences, and whether they were exchanged."""
    # With two sentences nothing is drawn, as in Megatron.
    pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
    exchanged = random.random_sample() < 0.5
    a, b = _join(sentences[:pivot]), _join(sentences[pivot:])
    return (b, a, True) if exchanged else (a, b, False)


def truncate_pair(
    a: np.ndarray, b: np.ndarray, target: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens one by one off the longer of A and B (B when equal), at its front or back by chance."""
    excess = max(0, len(a) + len(b) - target)
    left = {"a": [0, len(a)], "b": [0, len(b)]}
    # `excess` numbers drawn at once are the same as drawn one by one.
    for at_front in (random.random_sample(excess) < 0.5).tolist():
        longer = left["a"] if left["a"][1] - left["a"][0] > left["b"][1] - left["b"][0] else left["b"]
        if at_front:
            longer[0] += 1
        else:
            longer[1] -= 1
    return a[slice(*left["a"])], b[slice(*left["b"])]


def _join(sentences: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(sentences) if sentences else np.zeros(0, np.int64)


def build_bert(config: BertDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of BERT_SAMPLE; None for a split without data.

    Raises ConfigError for a tokenizer without CLS, SEP, MASK or PAD, DataError for data without sentences.
    """
    length = request.sequence_length
    plan = SentenceIndexPlan(
        max_length=check_length(length - _SPECIAL_PLACES, _SPECIAL_PLACES),
        min_sentences=2 if config.bert_binary_head else 1,
        short_sequence_probability=config.short_seq_prob,
        num_samples=request.num_samples,
        seed=request.seed,
    )
    ids = special_ids(tokenizer, ("cls", "sep", "mask", "pad"), config.dataset_type)
    masking = masking_rules(config, tokenizer, (ids["cls"], ids["sep"]))
    rules = BertRules(length, config.bert_binary_head, request.seed, tokenizer.vocab_size, masking=masking, **ids)
    return build_sentence_datasets(config, tokenizer, request, plan, lambda samples: BertDataset(samples, rules))
