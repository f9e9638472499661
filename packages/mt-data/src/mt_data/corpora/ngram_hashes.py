"""64-bit hashes of all n-grams of a text at once, in NumPy.

A unit (a word, or a character) is hashed as a polynomial of its mixed code points, an n-gram as a polynomial of its
units, both modulo 2^64, and the sum is mixed. Two different n-grams agree with a probability near 2^-64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_UNIT_BASE = np.uint64(0x9E3779B97F4A7C15)
_GRAM_BASE = np.uint64(0xD1342543DE82EF95)


def mix(values: U64) -> U64:
    """A bijection of 64-bit words in which each bit of the input changes half of the output (SplitMix64)."""
    # SplitMix64 (Steele, Lea and Flood 2014): the increment, then its finalizer. Overflow modulo 2^64 is intended.
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def character_hashes(text: str) -> U64:
    """One value a code point: uint64 [characters]."""
    return mix(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64))


def word_hashes(words: list[str]) -> U64:
    """One value a word: uint64 [words]. No word may be empty."""
    if not words:
        return np.empty(0, np.uint64)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    starts = np.cumsum(lengths) - lengths
    # int64 [characters of all words]: place of each within its word.
    place = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    # base^1, base^2, ... modulo 2^64: a word is the sum of its characters' values times the power of their place.
    powers = np.multiply.accumulate(np.full(lengths.max(), _UNIT_BASE))
    # reduceat sums from each start to the next; an empty word would repeat its neighbour's value, hence the condition.
    return mix(np.add.reduceat(character_hashes("".join(words)) * powers[place], starts))


def ngram_hashes(units: U64, n: int) -> U64:
    """The hash of each run of n units: uint64 [units - n + 1], empty when there are fewer units than n."""
    count = len(units) - n + 1
    if count < 1:
        return np.empty(0, np.uint64)
    total = units[:count].copy()
    for offset in range(1, n):
        # Horner's rule over all runs at once: n - 1 passes over the array in place of a loop over n-grams.
        total *= _GRAM_BASE
        total += units[offset : offset + count]
    # n is added so that runs of different lengths have different hashes.
    return mix(total + np.uint64(n))
