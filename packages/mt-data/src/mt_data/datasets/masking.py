"""Choosing what to mask: n-grams of words, by Megatron's rules and with its random numbers.

Candidates are words (or tokens), taken in random order. Each is lengthened to an n-gram of words by a
random n, shortened until it fits what is left to mask, and left out when it meets an earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt, model_validator

from mt_core.config.fields import Probability
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.config import IndexedDataConfig
from mt_data.datasets.text_files import STREAM_KEYS, refuse_unused

_GEOMETRIC_P = 0.2
"""SpanBERT, section 3.1."""


@dataclass(frozen=True)
class MaskingRules:
    """The `masking_*` keys of the data section, with what they need of the tokenizer.

    starts_word: bool [vocabulary], False for a token that continues a word; maskable: bool [vocabulary],
    False for CLS and SEP.
    """

    probability: float
    max_ngram: int
    full_words: bool
    longer_ngrams: bool
    geometric: bool
    starts_word: NDArray[np.bool_]
    maskable: NDArray[np.bool_]


class SpanMasker:
    """Draws the masked spans of a sample."""

    def __init__(self, rules: MaskingRules) -> None:
        self.rules = rules
        # p(n) proportional to 1 / n; Megatron favors long n-grams by reversing the list.
        weights = 1.0 / np.arange(1, rules.max_ngram + 1)
        weights = weights / weights.sum(keepdims=True)
        if rules.longer_ngrams:
            weights = weights[::-1]
        # Normalized twice and divided by the last cumulative value, as Megatron and RandomState.choice do one after the
        # other: a threshold that differs in its last bit can draw another n.
        chances = weights / weights.sum(keepdims=True)
        cumulative = chances.cumsum()
        self._cumulative = cumulative / cumulative[-1]

    def spans(
        self, tokens: NDArray[np.integer], target_length: int, random: np.random.RandomState
    ) -> Iterator[list[int]]:
        """Positions of one masked n-gram after the other, as they are drawn; no two overlap.

        The caller may draw from `random` for each before it takes the next. At most
        masking_probability of the tokens (at least one, and never more than that share of target_length)
        are masked.
        """
        positions, firsts = self._words(tokens)
        # Candidates are words: positions firsts[w] to firsts[w + 1] - 1 of the list of maskable positions.
        order = np.arange(len(firsts) - 1)
        random.shuffle(order)
        probability = self.rules.probability
        # A float where the first term is smaller; the comparison with counts is Megatron's.
        allowed = min(probability * target_length, max(1, round(len(tokens) * probability)))
        masked: set[int] = set()
        for word in order.tolist():
            if len(masked) >= allowed:
                break
            # Drawn for every candidate that is tried, also for one that is left out below: the stream of random numbers
            # must be Megatron's.
            longest = self._draw_ngram(random)
            span = _longest_fitting(positions, firsts, word, longest, allowed - len(masked))
            if span and masked.isdisjoint(span):
                masked.update(span)
                yield span

    def _words(self, tokens: NDArray[np.integer]) -> tuple[list[int], list[int]]:
        """Positions that can be masked, and where in that list each word starts (and, at last, its length)."""
        positions = np.flatnonzero(self.rules.maskable[tokens])
        if not self.rules.full_words:
            return positions.tolist(), list(range(len(positions) + 1))
        starts = self.rules.starts_word[tokens[positions]]
        # The first token of a truncated sample may continue a word; it begins a candidate all the same.
        starts[:1] = True
        return positions.tolist(), [*np.flatnonzero(starts).tolist(), len(positions)]

    def _draw_ngram(self, random: np.random.RandomState) -> int:
        if self.rules.geometric:
            return min(int(random.geometric(_GEOMETRIC_P)), self.rules.max_ngram)
        # What RandomState.choice(p=...) computes, without its checks of p at each call.
        return int(self._cumulative.searchsorted(random.random_sample(), side="right")) + 1


def _longest_fitting(positions: list[int], firsts: list[int], word: int, longest: int, room: float) -> list[int]:
    """Positions of the words from `word` on: as many as fit in `room` tokens, at most `longest`."""
    for count in range(longest, 0, -1):
        end = firsts[min(word + count, len(firsts) - 1)]
        if end - firsts[word] <= room:
            return positions[firsts[word] : end]
    return []


# -- configuration that BERT and T5 share ------------------------------------------------------------

CONTINUES_WORD = "##"


class MaskedDataConfig(IndexedDataConfig):
    """Token files whose sequences are sentences (mt data preprocess --split-sentences)."""

    mask_prob: Probability = 0.15
    """Share of the tokens that are masked."""
    short_seq_prob: Probability = 0.1
    """Share of the samples that are made shorter than seq_length."""
    masking_max_ngram: PositiveInt = 3
    """Most words in a row that are masked as one."""
    masking_do_full_word: bool = True
    """Mask whole words in place of pieces of words; needs a WordPiece tokenizer."""
    masking_use_longer_ngrams: bool = False
    """Draw n words with a probability that rises with n, in place of 1/n."""
    masking_use_geometric_distribution: bool = False
    """Draw the number of words from a geometric distribution with p = 0.2, as SpanBERT does."""

    @model_validator(mode="after")
    def _check_masking(self) -> MaskedDataConfig:
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"data.mask_prob={self.mask_prob} must lie between 0 and 1, both excluded")
        if self.masking_use_geometric_distribution and self.masking_use_longer_ngrams:
            raise ConfigError(
                "data.masking_use_longer_ngrams=true has no effect with "
                "data.masking_use_geometric_distribution=true; set one of them to false"
            )
        refuse_unused(self, STREAM_KEYS, "whose samples hold one document each")
        return self


def masking_rules(config: MaskedDataConfig, tokenizer: Tokenizer, unmaskable: tuple[int | None, ...]) -> MaskingRules:
    """The rules of the configuration. Raises ConfigError for whole words without a WordPiece tokenizer."""
    maskable = np.ones(tokenizer.vocab_size, np.bool_)
    # bool [vocabulary], indexed by token: a lookup per sample in place of comparisons with each special id.
    maskable[[token for token in unmaskable if token is not None]] = False
    return MaskingRules(
        probability=config.mask_prob,
        max_ngram=config.masking_max_ngram,
        full_words=config.masking_do_full_word,
        longer_ngrams=config.masking_use_longer_ngrams,
        geometric=config.masking_use_geometric_distribution,
        starts_word=starts_word(tokenizer) if config.masking_do_full_word else np.ones_like(maskable),
        maskable=maskable,
    )


def starts_word(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[vocabulary]: False for the WordPiece tokens that continue a word ("##ing")."""
    files = tokenizer.files()
    if "vocab.txt" in files:
        pieces = dict(enumerate(files["vocab.txt"].decode("utf-8").removesuffix("\n").split("\n")))
    else:
        pieces = _word_pieces_of_json(files.get("tokenizer.json", b"{}"))
    starts = np.ones(tokenizer.vocab_size, np.bool_)
    # Tokens without a piece, such as added sentinels, count as words.
    starts[[token for token, piece in pieces.items() if piece.startswith(CONTINUES_WORD)]] = False
    if starts.all():
        raise ConfigError(
            f'data.masking_do_full_word=true needs a tokenizer with WordPiece tokens ("{CONTINUES_WORD}ing"), and '
            "this one has none; set data.masking_do_full_word=false, or choose another tokenizer.tokenizer_type"
        )
    return starts


def _word_pieces_of_json(content: bytes) -> dict[int, str]:
    model = json.loads(content).get("model", {})
    vocab = model.get("vocab", {}) if model.get("type") == "WordPiece" else {}
    return {token: piece for piece, token in vocab.items()}


def check_length(max_length: int, special_places: int) -> int:
    """max_length, the tokens of a sample without special ones; ConfigError when it is too small to draw from."""
    if max_length < 2:
        raise ConfigError(
            f"data.seq_length={max_length + special_places} must be {special_places + 2} or more: "
            f"{special_places} special tokens and two of text"
        )
    return max_length
