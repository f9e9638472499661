"""Rows that share a key, by sorting in parts that fit the memory; union-find; fingerprints of documents on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.corpora.words import U64

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


# -- union-find over document ids, 8 bytes each ------------------------------------------------------


class DisjointSets:
    """`count` sets of one id each, to be united. A parent is never larger than its child."""

    def __init__(self, count: int) -> None:
        self.parent: Ids = np.arange(count, dtype=np.int64)

    def find(self, item: int) -> int:
        """The smallest id of the set that `item` is in; halves the path on the way."""
        parent = self.parent
        while parent[item] != item:
            # Path halving: paths stay short without a second pass and without ranks in memory.
            parent[item] = parent[parent[item]]
            item = int(parent[item])
        return item

    def union(self, first: int, other: int) -> None:
        first, other = self.find(first), self.find(other)
        # The smaller id becomes the root, which keeps "a parent is never larger than its child".
        self.parent[max(first, other)] = min(first, other)

    def flatten(self, chunk: int = 2**20) -> Ids:
        """The smallest id of each id's set. One pass, since parents come before their children."""
        for start in range(0, len(self.parent), chunk):
            rows = self.parent[start : start + chunk]
            while True:
                # Chunks before this one hold roots already; within the chunk chains are shortened until nothing
                # changes.
                above = self.parent[rows]
                if np.array_equal(above, rows):
                    break
                rows[:] = above
        return self.parent


# -- fingerprints on disk: little-endian rows, one for each document of a file -----------------------

CHUNK_BYTES = 2**22
MAPS_AT_ONCE = 10_000


@dataclass(frozen=True)
class RowFiles:
    """One kind of rows over all input files. paths: a file each; width: values a row."""

    paths: tuple[Path, ...]
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.width

    @cached_property
    def offsets(self) -> Ids:
        """The id of the first row of each file, and the number of all rows: int64 [files + 1]."""
        counts = [path.stat().st_size // self.row_bytes for path in self.paths]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def iter_chunks(self, columns: slice = slice(None)) -> Iterator[tuple[int, NDArray[Any]]]:
        """(id of the first row, some columns of the rows) over all files, by plain reads of bounded size."""
        rows_at_once = max(1, CHUNK_BYTES // self.row_bytes)
        for path, first in zip(self.paths, self.offsets, strict=False):
            with open(path, "rb") as stream:
                # Plain reads for passes from end to end; maps, in `gather`, for single rows at random places.
                while (rows := np.fromfile(stream, self.dtype, rows_at_once * self.width)).size:
                    rows = rows.reshape(-1, self.width)
                    yield int(first), rows[:, columns]
                    first += len(rows)

    def gather(self, ids: Ids) -> NDArray[Any]:
        """The rows of some ids: [ids, width]. A file that none of them is in is not opened."""
        rows = np.empty((len(ids), self.width), self.dtype)
        # [ids]; side="right" passes empty files, whose offset is that of the next one.
        files = np.searchsorted(self.offsets, ids, side="right") - 1
        for file in set(files.tolist()):
            inside = files == file
            rows[inside] = self._mapped(file)[ids[inside] - self.offsets[file]]
        return rows

    def place(self, row: int) -> int:
        """The number of the file that a row is in."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def _mapped(self, file: int) -> NDArray[Any]:
        if file not in self._maps:
            # Below vm.max_map_count, 65530 by default on Linux; arrays in use keep their maps.
            if len(self._maps) >= MAPS_AT_ONCE:
                self._maps.clear()
            self._maps[file] = np.memmap(self.paths[file], self.dtype, "r").reshape(-1, self.width)
        return self._maps[file]

    @cached_property
    def _maps(self) -> dict[int, NDArray[Any]]:
        return {}
