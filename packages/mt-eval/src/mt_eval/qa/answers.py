"""Comparing an answer with the right ones, as Megatron-LM's evaluation of InstructRetro does."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from mt_eval.metrics.answers import normalized_answer

NO_ANSWER = "no_passages_used"
"""A right answer of Megatron's files that stands for none."""
_CUE = re.compile(r"^\s*(?:the\s+)?(?:answer|a)\s*(?:is)?\s*:\s*", re.IGNORECASE)
_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))


def prediction_of(text: str) -> str:
    """Generated text on one line, without a cue such as "Answer:" at its beginning."""
    return " ".join(_CUE.sub("", text).split())


def f1_of_first(prediction: str, answers: Sequence[str]) -> float | None:
    """F1 over words with the first right answer, from 0 to 1; punctuation separates words. None without an answer."""
    # Megatron-LM's script compares with the first answer only.
    answer = "" if answers[0] == NO_ANSWER else answers[0]
    right = _words(answer)
    if not right:
        # A question without a right answer is left out of the mean.
        return None
    found = _words(prediction)
    shared = sum((Counter(found) & Counter(right)).values())
    return 2 * shared / (len(found) + len(right))


def _words(text: str) -> list[str]:
    # Punctuation separates words here, in SQuAD's normalization it is removed ("New-York").
    return normalized_answer(text.translate(_SPACES)).split()
