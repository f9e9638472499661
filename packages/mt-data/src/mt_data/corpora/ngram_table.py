"""The n-grams of the evaluation sets: sorted 64-bit hashes, 8 bytes each, looked up in NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.corpora.grouping import Ids
from mt_data.corpora.ngram_hashes import U64, ngram_hashes, word_hashes
from mt_data.corpora.words import normalized_words
from mt_data.preprocess.readers import Record, iter_records

GRAMS_AT_ONCE = 2**20


@dataclass(frozen=True)
class EvalGrams:
    """grams: per length, the sorted hashes. texts, too_short: how many there were, and could not be searched for."""

    grams: dict[int, U64]
    texts: int
    too_short: int


def collect_grams(paths: Sequence[Path], keys: Sequence[str], ngram: int, min_ngram: int) -> EvalGrams:
    """The n-grams of all texts under `keys` in the evaluation files.

    Raises DataError for a record with none of the keys, and when no text is long enough.
    """
    pending: dict[int, list[U64]] = {}
    grams: dict[int, U64] = {}
    texts = too_short = waiting = 0
    for text in (text for path in paths for record in iter_records(path) for text in eval_texts(record, keys)):
        words = normalized_words(text)
        # A text of min_ngram to ngram - 1 words is searched for as a whole, in a table of its own length.
        n = min(ngram, len(words))
        texts += 1
        if n < min_ngram:
            too_short += 1
            continue
        pending.setdefault(n, []).append(ngram_hashes(word_hashes(words), n))
        waiting += len(words)
        # Merged now and then, so that repeated n-grams of large evaluation sets do not pile up.
        if waiting > GRAMS_AT_ONCE:
            grams, pending, waiting = _merged(grams, pending), {}, 0
    grams = _merged(grams, pending)
    if not grams:
        raise DataError(
            f"none of the {texts} evaluation texts has {min_ngram} words or more; "
            "check --eval and --eval-keys, or lower --min-ngram"
        )
    return EvalGrams(grams, texts, too_short)


def eval_texts(record: Record, keys: Sequence[str]) -> Iterator[str]:
    """The texts under the keys, lists of texts item by item."""
    found = [record.value[key] for key in keys if record.value.get(key) is not None]
    if not found:
        names = ", ".join(map(repr, record.value)) or "none"
        raise DataError(
            f"{record.file}:{record.line} has none of --eval-keys {' '.join(keys)}; its keys are {names}, name them"
        )
    for value in found:
        yield from _flat_texts(value)


def _flat_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _flat_texts(item)


def _merged(grams: dict[int, U64], pending: dict[int, list[U64]]) -> dict[int, U64]:
    fresh = {
        n: np.unique(np.concatenate([grams.get(n, np.empty(0, np.uint64)), *parts])) for n, parts in pending.items()
    }
    return dict(sorted((grams | fresh).items()))


class GramTable:
    """Finds which n-grams of a document are in the table. `count` numbers them over all lengths."""

    def __init__(self, grams: dict[int, U64]) -> None:
        self.tables = {n: _SortedSet(hashes) for n, hashes in grams.items()}
        sizes = [len(hashes) for hashes in grams.values()]
        self.first = dict(zip(grams, np.cumsum([0, *sizes]).tolist(), strict=False))
        self.count = sum(sizes)

    def matches(self, words: list[str]) -> Iterator[tuple[int, Ids, Ids]]:
        """For each length: (n, positions of the first words, numbers of the n-grams)."""
        units = word_hashes(words)
        for n, table in self.tables.items():
            positions, ranks = table.find(ngram_hashes(units, n))
            yield n, positions, ranks + self.first[n]


class _SortedSet:
    """Membership by a bit table, which answers most misses with one access, then by binary search."""

    def __init__(self, hashes: U64) -> None:
        self.hashes = hashes
        # 16 to 32 places for each hash, so about one miss in 16 or fewer passes the first test; 2^27 bytes at most.
        bits = min(27, max(10, len(hashes).bit_length() + 4))
        self.shift = np.uint64(64 - bits)
        # Indexed by the upper bits of a hash.
        self.maybe = np.zeros(2**bits, np.bool_)
        self.maybe[hashes >> self.shift] = True

    def find(self, wanted: U64) -> tuple[Ids, Ids]:
        """(positions in `wanted` of the members, their ranks in the set)."""
        positions = np.flatnonzero(self.maybe[wanted >> self.shift])
        ranks = np.searchsorted(self.hashes, wanted[positions])
        # A value above all hashes has the rank len(hashes); the minimum keeps the index valid, and the values differ.
        inside = self.hashes[np.minimum(ranks, len(self.hashes) - 1)] == wanted[positions]
        return positions[inside], ranks[inside].astype(np.int64)


def save_grams(folder: Path, grams: dict[int, U64]) -> None:
    """A file for each length; those of an earlier table go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.grams"):
        old.unlink()
    for n, hashes in grams.items():
        hashes.astype("<u8").tofile(folder / f"{n:04d}.grams")


def load_grams(folder: Path) -> dict[int, U64]:
    """The table as mapped memory, which the processes share."""
    return {int(path.stem): np.memmap(path, "<u8", "r") for path in sorted(folder.glob("*.grams"))}


def without_frequent(grams: dict[int, U64], documents: NDArray[np.int64], maximum: int) -> dict[int, U64]:
    """The n-grams that are in at most `maximum` documents. documents: int64, by the numbers of `GramTable`."""
    rare, start = {}, 0
    for n, hashes in grams.items():
        kept = hashes[documents[start : start + len(hashes)] <= maximum]
        start += len(hashes)
        if len(kept):
            rare[n] = np.asarray(kept)
    return rare


def count_documents(paths: Iterable[Path], count: int) -> NDArray[np.int64]:
    """How many documents each n-gram is in, from files of n-gram numbers (uint32, once a document)."""
    total = np.zeros(count, np.int64)
    for path in paths:
        with open(path, "rb") as stream:
            while (numbers := np.fromfile(stream, "<u4", 2**20)).size:
                total += np.bincount(numbers, minlength=count)
    return total
