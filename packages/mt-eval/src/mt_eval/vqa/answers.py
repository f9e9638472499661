"""Comparing an answer with those that people gave, as VQAv2's evaluation does (Antol et al. 2015, Goyal et al. 2017).

Apostrophes are left out, where the reference has a list of contractions without them that it completes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
BETWEEN_DIGITS = re.compile(r"\d,\d")
LONE_PERIOD = re.compile(r"\.(?!\d)")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(NUMBERS)}}
ARTICLES = frozenset({"a", "an", "the"})
ENOUGH = 3
"""People who gave an answer, for it to be fully right."""


def normalized(answer: str) -> str:
    """Lower case, without punctuation and articles, numbers as digits."""
    given = answer.replace("\n", " ").replace("\t", " ").strip()
    text = given
    for mark in PUNCTUATION:
        # A mark beside a space, or any mark in a text with a number such as 1,000, is dropped; others separate words.
        # In the text as it was given: other marks have become spaces since.
        is_apart = f"{mark} " in given or f" {mark}" in given or BETWEEN_DIGITS.search(given)
        text = text.replace(mark, "" if is_apart else " ")
    # A period is kept within a number.
    text = LONE_PERIOD.sub("", text).replace("'", "").lower()
    words = (DIGITS.get(word, word) for word in text.split())
    return " ".join(word for word in words if word not in ARTICLES)


def vqa_accuracy(answer: str, given: Sequence[str]) -> float:
    """The mean over people of min(1, others who gave this answer / 3); with one person's answer, whether it is that."""
    own = normalized(answer)
    matches = [normalized(other) == own for other in given]
    if len(matches) == 1:
        return float(matches[0])
    total = sum(matches)
    # The answer is compared with all people but one, in turn: VQAv2 averages over the subsets of nine of ten.
    return sum(min(1.0, (total - match) / ENOUGH) for match in matches) / len(matches)


def exact_match(answer: str, given: Sequence[str]) -> float:
    """Whether it is one of them, white space around it aside."""
    return float(answer.strip() in {other.strip() for other in given})
