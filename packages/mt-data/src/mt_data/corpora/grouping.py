"""Rows that share a key, found by sorting in parts that fit the memory given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mt_data.corpora.ngram_hashes import U64

Ids = NDArray[np.int64]
Chunks = Callable[[], Iterable[tuple[int, U64]]]
"""Gives (id of the first row, keys uint64 [rows, words]) for all rows in their order; called once per part."""


def iter_equal_groups(chunks: Chunks, total: int, words: int, memory_bytes: int) -> Iterator[Ids]:
    """The ids, ascending, of each two or more rows with equal keys; keys must be spread evenly, as hashes are.

    All keys are read once for each part of the key range; a part takes 24 + 24 x words bytes a row. Only a key
    that a great share of all rows have makes a part larger than requested.
    """
    # Keys and ids, their copies while parts are joined and sorted, and the order: three times 8 bytes for each id and
    # word.
    parts = max(1, -(-total * (24 + 24 * words) // memory_bytes))
    for part in range(parts):
        yield from _groups_of(*_gather(chunks, part, parts, words))  # unnamed, so that one part is held at a time


def _gather(chunks: Chunks, part: int, parts: int, words: int) -> tuple[U64, Ids]:
    """The keys in one of `parts` equal ranges of the first word's upper half, with their ids."""
    keys, ids = [np.empty((0, words), np.uint64)], [np.empty(0, np.int64)]
    for first, rows in chunks():
        # upper 32 bits * parts / 2^32: the number of the part, 0 to parts - 1. Equal keys fall into one part.
        inside = ((rows[:, 0] >> np.uint64(32)) * np.uint64(parts)) >> np.uint64(32) == part
        keys.append(rows[inside])
        ids.append(first + np.flatnonzero(inside))
    return np.concatenate(keys), np.concatenate(ids)


def _groups_of(keys: U64, ids: Ids) -> Iterator[Ids]:
    order = np.lexsort(keys.T)  # stable: ids stay ascending within a group
    ordered = keys[order]
    differs = np.any(ordered[1:] != ordered[:-1], axis=1)
    # Where each run of equal keys begins in the sorted order, and the end.
    starts = np.concatenate([[0], np.flatnonzero(differs) + 1, [len(ids)]])
    for group in np.flatnonzero(np.diff(starts) > 1):
        yield ids[order[starts[group] : starts[group + 1]]]
