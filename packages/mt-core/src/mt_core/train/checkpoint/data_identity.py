"""Fingerprints that identify the training data, stored in checkpoints. The configuration only names files.

Blend, split and seed are configuration values. The fingerprints of the data sets and of the tokenizer show whether
the files they name have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mt_core.specs import Tokenizer

CONTENT, TOKENIZER = "data.content", "tokenizer.content"
"""Not configuration keys, but checkpoint.accept_changes accepts them in the same way."""


class Change(NamedTuple):
    """A key whose value differs from the one in the checkpoint."""

    key: str
    then: Any
    now: Any


def data_identity(train_data: Any, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Fingerprints by key. A data set without `fingerprint()`, such as a caller's own class, has no entry."""
    sources = {CONTENT: train_data, TOKENIZER: tokenizer}
    fingerprints = {key: getattr(source, "fingerprint", None) for key, source in sources.items()}
    return {key: str(fingerprint()) for key, fingerprint in fingerprints.items() if fingerprint is not None}


def data_changes(stored: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    """The fingerprints that differ. A fingerprint that either side lacks is not compared."""
    for key in sorted(stored.keys() & now.keys()):
        if stored[key] != now[key]:
            # 16 digits are enough to show that two hashes differ.
            yield Change(key, stored[key][:16], now[key][:16])
