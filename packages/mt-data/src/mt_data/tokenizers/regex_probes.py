"""Trial of the regular expressions of a tokenizer.json that may take exponential time.

The library's matcher gives up after a number of steps, by a panic, which writes a report of many lines to standard
error wherever a text is encoded. An expression that gives up on a short trial text is refused when the file is read.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mt_data.tokenizers.limits import components

PARTS = ("normalizer", "pre_tokenizer", "decoder")
LENGTH = 40
"""Characters of a trial: 2^40 ways to divide them are beyond any limit, and a polynomial of them is not."""
_REPEATED_GROUP = re.compile(r"\)(?:[+*]|\{\d*,?\d*\})")
_STDERR = 2
_lock = threading.Lock()


def endless_pattern(content: Mapping[str, Any]) -> tuple[str, str] | None:
    """(part, regular expression) of the first that the matcher gives up on; None without one.

    content: the JSON of the file.
    """
    repeated = [(part, text) for part in PARTS for text in _patterns(content.get(part)) if _REPEATED_GROUP.search(text)]
    if not repeated:
        return None
    with _lock, _silent_stderr():
        return next(((part, text) for part, text in repeated if _gives_up(text)), None)


def _patterns(part: Any) -> Iterator[str]:
    for step in components(part):
        pattern = step.get("pattern")
        text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        if isinstance(text, str):
            yield text


def _gives_up(pattern: str) -> bool:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    letters = sorted(set(re.findall(r"[A-Za-z0-9 ]", pattern)))[:8]
    try:
        split = Split(Regex(pattern), "isolated")
        for letter in letters or ["a"]:
            # With an end that the expression takes, and one that it does not.
            for text in (letter * LENGTH, letter * LENGTH + "!"):
                split.pre_tokenize_str(text)
    except BaseException as error:
        # Expressions that cannot be compiled are reported by the library when it reads the file.
        if isinstance(error, Exception):
            return False
        if type(error).__name__ == "PanicException":
            return True
        raise
    return False


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Leave out what a library writes to standard error, past Python's sys.stderr."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        saved = os.dup(_STDERR)
    except OSError:  # no standard error, as of a daemon
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)
        os.close(nowhere)
