"""An indexed dataset read from end to end, in chunks and checked on the way: for merging and verifying.

Memory is a few chunks of storage.CHUNK_ELEMENTS, whatever the size of the data set. Files are read plainly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.indexed.dataset import check_files
from mt_data.indexed.layout import LENGTH, MODE, POINTER, data_path, index_path
from mt_data.indexed.storage import chunks, open_plain


class Scan:
    """One pair of files; each method reads one array, and raises DataError at the first fault in it.

    multimodal: whether there must be modes; None to tell it from the size of `.idx`.
    """

    def __init__(self, prefix: str, multimodal: bool | None = None) -> None:
        self.prefix = prefix
        self.sizes = check_files(prefix, multimodal=multimodal)
        self.layout = self.sizes.layout
        self._idx = open_plain(index_path(prefix))
        self._bin = open_plain(data_path(prefix))

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Lengths of the sequences, int32 [chunk]; they and the byte offsets must follow one from another."""
        layout = self.layout
        begin, first = 0, 0
        # Two readers at different places of one file, in chunks of equally many elements, so that zip pairs row with
        # row.
        all_lengths = chunks(self._idx, layout.lengths_at, layout.num_sequences, LENGTH)
        all_pointers = chunks(self._idx, layout.pointers_at, layout.num_sequences, POINTER)
        for lengths, pointers in zip(all_lengths, all_pointers, strict=True):
            # int64 [chunk]: byte at which each sequence ends, were they stored without gaps.
            ends = begin + np.cumsum(lengths, dtype=np.int64) * layout.dtype.itemsize
            self._check_lengths(first, lengths, pointers, np.concatenate([[begin], ends[:-1]]))
            begin, first = int(ends[-1]), first + len(lengths)
            yield lengths
        if begin != self.sizes.data_bytes:
            raise DataError(
                f"{index_path(self.prefix)}: the lengths add up to {begin} bytes, "
                f"{data_path(self.prefix)} has {self.sizes.data_bytes}"
            )

    def _check_lengths(self, first: int, lengths: np.ndarray, pointers: np.ndarray, expected: np.ndarray) -> None:
        wrong = np.flatnonzero((lengths < 0) | (pointers != expected))
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"{index_path(self.prefix)}: sequence {first + i} has length {lengths[i]} and byte offset "
                f"{pointers[i]}; the sequences before it end at {expected[i]}"
            )

    def boundaries(self) -> Iterator[NDArray[np.int64]]:
        """First sequences of the documents and, at last, S: int64 [chunk]; they must not go back."""
        before, first = 0, 0
        for values in chunks(self._idx, self.layout.documents_at, self.layout.num_boundaries, POINTER):
            # prepend carries the last boundary of the chunk before, so that a step back between two chunks is seen too.
            wrong = np.flatnonzero(np.diff(values, prepend=before) < 0)
            if len(wrong):
                i = int(wrong[0])
                raise DataError(
                    f"{index_path(self.prefix)}: document boundary {first + i} is sequence {values[i]}, "
                    f"before the boundary in front of it ({values[i - 1] if i else before})"
                )
            before, first = int(values[-1]), first + len(values)
            yield values

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Modes of the sequences, int8 [chunk]; nothing unless multimodal."""
        if self.layout.multimodal:
            yield from chunks(self._idx, self.layout.modes_at, self.layout.num_sequences, MODE)

    def tokens(self) -> Iterator[np.ndarray]:
        """All tokens in the data set's dtype, [chunk]."""
        return chunks(self._bin, 0, self.sizes.num_tokens, self.layout.dtype)

    def index_bytes(self) -> Iterator[np.ndarray]:
        """`.idx` as it is, uint8 [chunk]."""
        return chunks(self._idx, 0, self.sizes.index_bytes, np.dtype(np.uint8))
