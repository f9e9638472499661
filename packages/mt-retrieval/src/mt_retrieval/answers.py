"""Whether a passage has the answer of a question, as DPR's evaluation defines it (Karpukhin et al., 2020).

Both sides are in Unicode's normal form D, so that accents count. By string: the answer's tokens, in lower case, are a
contiguous part of the passage's. By regex: the answer is a pattern, found in the passage whatever its case. Titles are
not searched.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

import regex

Match = Literal["string", "regex"]
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
"""A run of letters, numbers and marks, or any other character that is neither a separator nor a control character."""
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


def has_answer(answers: Sequence[str], text: str, match: Match = "string") -> bool:
    """Whether the text has one of the answers. A pattern that is not valid is not found."""
    if match == "regex":
        text = unicodedata.normalize("NFD", text)
        return any(_matches(unicodedata.normalize("NFD", answer), text) for answer in answers)
    tokens = normalized_tokens(text)
    return any(_contains(tokens, normalized_tokens(answer)) for answer in answers)


def normalized_tokens(text: str) -> tuple[str, ...]:
    return tuple(token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text)))


def _contains(tokens: Sequence[str], part: Sequence[str]) -> bool:
    size = len(part)
    # An answer of no tokens is found in every text, as in DPR.
    return any(tokens[first : first + size] == part for first in range(len(tokens) - size + 1))


def _matches(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, _FLAGS) is not None
    except regex.error:
        return False
