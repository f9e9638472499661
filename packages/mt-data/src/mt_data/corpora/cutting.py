"""Cutting runs of words, and some text around them, out of a text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from mt_data.corpora.words import iter_word_spans

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
