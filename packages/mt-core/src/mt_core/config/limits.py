"""Limits on what a configuration may hold, so that an absurd file ends in a sentence and not in endless work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 50
TOO_DEEP = f"tables and lists are nested more than {MAX_DEPTH} levels deep; no key of a configuration is"
# Possessive quantifiers (++, *+): without backtracking the search is linear in the text.
_LONG_KEY = re.compile(r"(?<![\w.-])(?:[\w-]++\s*+\.\s*+){50}")


def refuse_long_keys(text: str) -> None:
    """Raises ValueError for keys of 50 parts and more, which tomllib reads in quadratic time."""
    if _LONG_KEY.search(text):
        raise ValueError(TOO_DEEP)


def require_depth(values: Any) -> None:
    """Raises ValueError for tables and lists in more than MAX_DEPTH levels."""
    # A stack of its own: recursion would end in RecursionError for the values that this refuses.
    waiting = [(values, MAX_DEPTH)]
    while waiting:
        value, levels = waiting.pop()
        if not isinstance(value, Mapping | list):
            continue
        if not levels:
            raise ValueError(TOO_DEEP)
        entries = value.values() if isinstance(value, Mapping) else value
        waiting.extend((entry, levels - 1) for entry in entries)
