"""Rows of a `.npy` file whose blocks are compared with their checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_data.indexed.blocks import CheckedBlocks
from mt_data.indexed.storage import MappedFile
from mt_data.records import BlockedFile


class Rows(Protocol):
    """A two-dimensional array, of which rows are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> NDArray[np.integer]: ...


class CheckedRows:
    """The first `columns` columns of an array that is mapped into memory. A block is compared at its first use.

    array: as np.load gives it with mmap_mode. stored: its record in `manifest`. cure: what to do about damage.
    """

    def __init__(self, array: np.memmap, columns: int, stored: BlockedFile, manifest: Path, cure: str) -> None:
        self.dtype, self.shape, self.columns = array.dtype, array.shape, columns
        path = Path(str(array.filename))
        file = MappedFile(str(path), path.stat().st_size)
        self._blocks = CheckedBlocks(file, str(manifest), lambda: stored.blocks, cure)
        # Byte of the file at which NumPy's header ends and the rows begin.
        self._begin = array.offset
        self._row_bytes = array.shape[1] * array.dtype.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice, /) -> NDArray[np.integer]:
        """Raises DataError for damage in them."""
        # Python's rules for slices past the end; all callers use step 1.
        first, stop, _ = rows.indices(len(self))
        data = self._blocks.view(self._begin + first * self._row_bytes, max(stop - first, 0) * self._row_bytes)
        # [rows, columns]; a C-ordered array has its rows one behind the other, so a range of rows is a range of bytes.
        return np.frombuffer(data, self.dtype).reshape(-1, self.shape[1])[:, : self.columns]
