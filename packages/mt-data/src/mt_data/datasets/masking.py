"""Choosing what to mask: n-grams of words, by Megatron's rules and with its random numbers.

Candidates are words (or tokens), taken in random order. Each is lengthened to an n-gram of words by a
random n, shortened until it fits what is left to mask, and left out when it meets an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
