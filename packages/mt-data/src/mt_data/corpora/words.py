"""Words as near-duplicate and overlap search see them (lower case, no punctuation), and cutting them out of a text."""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

# Scripts written without spaces between words: each character is taken as a word. Han, kana, Bopomofo, Yi, Thai,
# Lao, Tibetan, Myanmar, Khmer, and the Han of the second plane.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u30ff\u3100-\u312f\u3400-\u4dbf\u4e00-\u9fff"
_UNSPACED += "\ua000-\ua4cf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
_ASTRAL = "\U00010000"
_ASCII_MARKS = str.maketrans("", "", string.punctuation)
# A kana's voicing mark may be a character of its own, behind it.
_VOICING = "\u3099\u309a\uff9e\uff9f"
_TOKEN = re.compile(f"[{_UNSPACED}][{_VOICING}]*|[^\\s{_UNSPACED}]+")


@cache
def _punctuation() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The Unicode categories P (punctuation) and S (symbols), below and from U+10000 on.

    Two patterns, since a set of characters is a table only where it has none beyond U+FFFF, else a slow search.
    """
    marks = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "PS"]
    low, high = [mark for mark in marks if mark < _ASTRAL], [mark for mark in marks if mark >= _ASTRAL]
    return re.compile(f"[{re.escape(''.join(low))}]+"), re.compile(f"[{re.escape(''.join(high))}]+")


def without_punctuation(text: str) -> str:
    if text.isascii():
        return text.translate(_ASCII_MARKS)
    low, high = _punctuation()
    text = low.sub("", text)
    return high.sub("", text) if max(text, default="") >= _ASTRAL else text


def normalized_words(text: str) -> list[str]:
    """The words of a text in lower case without punctuation; what is punctuation alone is no word.

    Compared in Unicode's form NFKC, so that composed and decomposed characters, ligatures and full-width letters are
    the same words. This is GPT-3's gram (Brown et al. 2020, appendix C: "a lowercase, whitespace delimited word with no
    punctuation"), except that in scripts without spaces each character is a word.
    """
    if text.isascii():
        return without_punctuation(text.lower()).split()
    # Cut first: a mark may stand between two words of a script without spaces.
    if unicodedata.is_normalized("NFKC", text):
        return [word for token in _TOKEN.findall(text.lower()) if (word := without_punctuation(token))]
    return [word for token in _TOKEN.findall(text) if (word := _normalized(token))]


def _normalized(token: str) -> str:
    """The token as one word, although some characters have spaces in NFKC; punctuation of either form is left out."""
    compatible = unicodedata.normalize("NFKC", without_punctuation(token))
    return without_punctuation("".join(compatible.lower().split()))


def iter_word_spans(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) in `text` of each of its `normalized_words`, punctuation at the word included."""
    for match in _TOKEN.finditer(text):
        if _normalized(match.group()):
            yield match.span()


# 64-bit hashes of all n-grams of a text at once, in NumPy.
#
# A unit (a word, or a character) is hashed as a polynomial of its mixed code points, an n-gram as a polynomial of its
# units, both modulo 2^64, and the sum is mixed. Two different n-grams agree with a probability near 2^-64.

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


# -- cutting runs of words, and some text around them, out of a text ---------------------------------

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, those that overlap or touch as one."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def covered_share(spans: Iterable[Span], words: int) -> float:
    """The share of the words that the spans (first word, behind the last) cover."""
    return sum(end - start for start, end in merged(spans)) / words


def cut_pieces(text: str, spans: Iterable[Span], window: int) -> list[str]:
    """What is left of a text without the spans of words and `window` characters on either side of each.

    A word that a window reaches into goes whole. Pieces have no blanks at their ends, and none is empty.
    """
    words = list(iter_word_spans(text))
    cuts = merged(
        _whole_words(words, len(text), words[start][0] - window, words[end - 1][1] + window)
        for start, end in merged(spans)
    )
    # What lies between the cuts: from the end of each to the start of the next.
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    pieces = (text[start:end].strip() for start, end in zip(starts, ends, strict=True))
    return [piece for piece in pieces if piece]


def _whole_words(words: list[Span], length: int, start: int, end: int) -> Span:
    """The range widened to the ends of the words it cuts in two; without a word beyond, to the end of the text."""
    # words[first] is the first that ends behind `start`, words[last] the last that begins before `end`.
    first = bisect_right(words, start, key=lambda word: word[1])
    last = bisect_left(words, end, key=lambda word: word[0]) - 1
    start = min(start, words[first][0]) if start > words[0][0] else 0
    end = max(end, words[last][1]) if end < words[-1][1] else length
    return start, end
