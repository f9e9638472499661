"""Fingerprints of documents on disk: per input file, raw little-endian rows, a document each, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.corpora.grouping import Ids

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
        found = np.empty((len(ids), self.width), self.dtype)
        # [ids]; side="right" passes empty files, whose offset is that of the next one.
        files = np.searchsorted(self.offsets, ids, side="right") - 1
        for file in set(files.tolist()):
            inside = files == file
            found[inside] = self._mapped(file)[ids[inside] - self.offsets[file]]
        return found

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
