"""Samples for T5: spans of text replaced by sentinels, which the decoder restores.

The order of samples and every value are Megatron's for the same seed, sizes and split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.masking import MaskedDataConfig, MaskingRules, SpanMasker, check_length, masking_rules
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.pair_encoding import special_ids
from mt_data.datasets.sentences import SentenceDataset, SentenceIndexPlan, SentenceSamples, build_sentence_datasets

NO_LABEL = -1
"""Label of the decoder's padding."""


_SPECIAL_PLACES = 2


class T5DataConfig(MaskedDataConfig):
    """Stretches of sentences with spans of words replaced by sentinels."""

    dataset_type: str = "t5"
    decoder_seq_length: PositiveInt = 128
    """Positions of the decoder: BOS, and the masked spans with their sentinels."""
    masking_max_ngram: PositiveInt = 10
    """Most words of a span."""
    masking_use_geometric_distribution: bool = True
    """Draw the words of a span from a geometric distribution with p = 0.2; false draws n with probability
    in proportion to 1/n."""


@dataclass(frozen=True)
class T5Rules:
    """How sentences become a sample; the sentinels are used in their order."""

    sequence_length: int
    decoder_length: int
    seed: int
    bos: int
    eos: int
    pad: int
    sentinels: tuple[int, ...]
    masking: MaskingRules


class T5Dataset(SentenceDataset):
    """Sample k is made of row k of the sentence index; its random numbers depend on seed + k only."""

    def __init__(self, samples: SentenceSamples, rules: T5Rules) -> None:
        super().__init__(samples)
        self.rules = rules
        self._masker = SpanMasker(rules.masking)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        sentences, target = self.samples.sentences(index), self.samples.row(index)[2]
        whole = np.concatenate(sentences)
        tokens = whole[:target]
        random = np.random.RandomState((self.rules.seed + index) % 2**32)
        # Drawn in random order; sentinels are given in the order of the text.
        spans = sorted(self._masker.spans(tokens, target, random))
        if len(spans) > len(self.rules.sentinels):
            raise self._too_few_sentinels(index, len(spans))
        encoder, restored = corrupt(tokens.tolist(), spans, self.rules.sentinels)
        truncated = np.array(int(len(whole) > target), np.int64)
        return self._padded(index, encoder, restored) | {"truncated": truncated}

    def _padded(self, index: int, encoder: list[int], restored: list[int]) -> dict[str, np.ndarray]:
        rules = self.rules
        # Teacher forcing: position i reads what position i - 1 was to predict.
        decoder, labels = [rules.bos, *restored], [*restored, rules.eos]
        if len(decoder) > rules.decoder_length:
            raise DataError(
                f"{self.describe(index)}: the masked spans and their sentinels need {len(decoder)} decoder "
                f"positions, data.decoder_seq_length={rules.decoder_length} are there; set it to "
                f"{len(decoder)} or more, or make data.mask_prob smaller"
            )
        width, decoder_width = rules.sequence_length, rules.decoder_length
        decoder_mask = _mask(len(decoder), decoder_width)
        return {
            "encoder_tokens": _pad(encoder, width, rules.pad),
            "decoder_tokens": _pad(decoder, decoder_width, rules.pad),
            "labels": _pad(labels, decoder_width, NO_LABEL),
            "loss_mask": decoder_mask.astype(np.float32),
            "encoder_mask": _mask(len(encoder), width),
            "decoder_mask": decoder_mask,
        }

    def _too_few_sentinels(self, index: int, spans: int) -> DataError:
        return DataError(
            f"{self.describe(index)}: {spans} spans are masked and the tokenizer has "
            f"{len(self.rules.sentinels)} sentinels; set tokenizer.vocab_extra_ids to {spans} or more, or make "
            "data.mask_prob smaller"
        )


def corrupt(
    tokens: Sequence[int], spans: Sequence[Sequence[int]], sentinels: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(tokens with each span replaced by its sentinel, each sentinel followed by its span's tokens).

    spans: positions of each, ordered. What lies between a span's first and last position goes with it.
    """
    kept: list[int] = []
    restored: list[int] = []
    start = 0
    # tokens a b c d e with the spans [1] and [3, 4]:
    #   kept     a S0 c S1
    #   restored S0 b S1 d e
    for span, sentinel in zip(spans, sentinels, strict=False):
        kept += [*tokens[start : span[0]], sentinel]
        restored += [sentinel, *(tokens[position] for position in span)]
        start = span[-1] + 1
    kept += tokens[start:]
    return kept, restored


def _pad(ids: list[int], width: int, filler: int) -> np.ndarray:
    padded = np.full(width, filler, np.int64)
    padded[: len(ids)] = ids
    return padded


def _mask(count: int, width: int) -> np.ndarray:
    return (np.arange(width) < count).astype(np.int64)


def build_t5(config: T5DataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of T5_SAMPLE; None for a split without data.

    Raises ConfigError for a tokenizer without BOS, EOS, PAD or sentinels, DataError for data without sentences.
    """
    if not tokenizer.special.sentinels:
        raise ConfigError(
            f'data.dataset_type="{config.dataset_type}" needs sentinels, and the tokenizer has none; set '
            "tokenizer.vocab_extra_ids=100"
        )
    plan = SentenceIndexPlan(
        max_length=check_length(request.sequence_length - _SPECIAL_PLACES, _SPECIAL_PLACES),
        min_sentences=1,
        short_sequence_probability=config.short_seq_prob,
        num_samples=request.num_samples,
        seed=request.seed,
    )
    special = tokenizer.special
    rules = T5Rules(
        sequence_length=request.sequence_length,
        decoder_length=config.decoder_seq_length,
        seed=request.seed,
        sentinels=special.sentinels,
        masking=masking_rules(config, tokenizer, (special.cls, special.sep)),
        **special_ids(tokenizer, ("bos", "eos", "pad"), config.dataset_type),
    )
    return build_sentence_datasets(config, tokenizer, request, plan, lambda samples: T5Dataset(samples, rules))
