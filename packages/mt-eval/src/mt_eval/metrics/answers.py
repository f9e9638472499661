"""Exact match and F1 of short answers (Rajpurkar et al. 2016, SQuAD, and its evaluation script)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, references: Sequence[str]) -> float:
    """1 if the normalized text is one of the normalized references."""
    return float(normalized_answer(text) in {normalized_answer(reference) for reference in references})


def f1(text: str, references: Sequence[str]) -> float:
    """Of the words that the normalized texts share; the best over the references."""
    return max(_f1(normalized_answer(text).split(), normalized_answer(one).split()) for one in references)


def _f1(words: list[str], reference: list[str]) -> float:
    # SQuAD 2: of two empty answers F1 is 1, of one 0.
    if not words or not reference:
        return float(words == reference)
    shared = sum((Counter(words) & Counter(reference)).values())
    # 2 P R / (P + R) with P = shared / len(words), R = shared / len(reference).
    return 2 * shared / (len(words) + len(reference))
