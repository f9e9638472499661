"""Exact duplicates: 16-byte digests on disk, sorted in parts.

Disk: 24 bytes a document while it runs, then 8 more (32 MB a million). Memory: what sorting is given.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from mt_data.corpora.dedup_options import DedupOptions, Normalization
from mt_data.corpora.fingerprints import RowFiles
from mt_data.corpora.grouping import Ids, iter_equal_groups
from mt_data.corpora.report import Report
from mt_data.corpora.streaming import Batch, BatchResult, Reading, RunBatch
from mt_data.corpora.words import normalized_words

DIGEST_WORDS = 2


def normalize(text: str, how: Normalization) -> str:
    """The text as it is compared; see `DedupOptions.normalize`. A text without any word is compared as it is."""
    if how == "blanks":
        return " ".join(text.split())
    if how == "words":
        # `or text`: texts of punctuation alone would otherwise all be equal.
        return " ".join(normalized_words(text)) or text
    return text


def digest(text: str) -> bytes:
    """16 bytes: among 10^9 different texts two agree with a probability near 10^-21."""
    # surrogatepass: JSON can hold lone surrogates, which plain UTF-8 refuses.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8 * DIGEST_WORDS).digest()


@dataclass(frozen=True)
class DigestTask:
    """Writes, per document, its digest (2 x uint64) and its line (uint64)."""

    options: DedupOptions
    reading: Reading

    def identity(self) -> dict[str, Any]:
        return {"pass": "digests", "normalize": self.options.normalize, "reading": vars(self.reading)}

    def open(self) -> RunBatch:
        def run(batch: Batch) -> BatchResult:
            texts = (normalize(record.value[self.reading.key], self.options.normalize) for record in batch.records)
            digests = b"".join(map(digest, texts))
            lines = np.array([record.line for record in batch.records], "<u8").tobytes()
            return BatchResult((lines, digests), Report(read=len(batch.records)))

        return run


def mark_exact(digests: RowFiles, original: Ids, memory_bytes: int) -> None:
    """Write into `original` (int64 [documents], -1 before) the first document that each repeated one equals."""
    for group in iter_equal_groups(digests.iter_chunks, digests.total, DIGEST_WORDS, memory_bytes):
        # Ids ascend within a group, so group[0] is the first in the order of the inputs.
        original[group[1:]] = group[0]
