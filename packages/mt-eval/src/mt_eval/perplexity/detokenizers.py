"""Undoing the tokenization of the WikiText and Penn Treebank files, as Megatron-LM's zero-shot tasks did.

The rules are applied in order to the whole file, each from left to right once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Detokenize = Callable[[str], str]

_PAIRS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(\()\s*([^)]*?)\s*(\))",
        r"(\[)\s*([^\]]*?)\s*(\])",
        r"(\{)\s*([^}]*?)\s*(\})",
        r'(")\s*([^"]*?)\s*(")',
        r"(')\s*([^']*?)\s*(')",
    )
)
"""Brackets, then quotes: without the white space next to them on the inside."""
_WIKITEXT_BEFORE = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_WIKITEXT_AFTER = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """Of the WikiText files; quotes are paired across lines."""
    text = _replaced(text, _WIKITEXT_BEFORE)
    for pair in _PAIRS:
        text = pair.sub(r"\1\2\3", text)
    return _replaced(text, _WIKITEXT_AFTER)


def ptb(text: str) -> str:
    """Of the Penn Treebank files."""
    return _replaced(text, _PTB)


def unchanged(text: str) -> str:
    return text


DETOKENIZERS: dict[str, Detokenize] = {"none": unchanged, "wikitext": wikitext, "ptb": ptb}


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for found, replacement in rules:
        text = text.replace(found, replacement)
    return text
