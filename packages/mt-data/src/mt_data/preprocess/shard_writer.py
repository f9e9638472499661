"""Writes the indexed dataset of one shard, quickly: it is read once, by the run's own join.

Unlike `IndexedDatasetWriter` it takes tokens of many documents to the file at a time, writes no manifest, and
keeps 4 bytes a sequence and 8 a document in memory, which a shard's size bounds.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from mt_core.errors import DataError
from mt_data.indexed.layout import LENGTH, POINTER, Layout

FLUSH_TOKENS = 1 << 16
SUFFIX = ".tmp"


class ShardWriter:
    """Files get their names in `finish`. As a context manager it removes what it wrote unless that was called.

    vocab_size: ids from it on are refused (DataError): they would be other ids in a narrow dtype.
    Raises OSError as files do.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, vocab_size: int) -> None:
        self.prefix = prefix
        self.tokens = 0
        self._dtype, self._vocab_size = dtype, vocab_size
        self._pieces: list[np.ndarray] = []
        self._held = 0
        # C int and long long: 4 and 8 bytes an entry, as in the index; a list of Python integers takes over 30.
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._paths = [f"{prefix}.bin", f"{prefix}.idx"]
        # Unbuffered: `_flush` collects FLUSH_TOKENS itself, and a second buffer would only copy.
        self._bin = open(self._paths[0] + SUFFIX, "wb", buffering=0)  # noqa: SIM115

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After `finish` nothing is left under the temporary names, and the unlinks below find nothing.
        self._bin.close()
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path + SUFFIX)

    @property
    def sequences(self) -> int:
        return len(self._lengths)

    def add_document(self, pieces: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
        """Append a document: the pieces' ids, one after another, are its sequences of the lengths given."""
        self._pieces.extend(pieces)
        self._lengths.extend(lengths)
        self._boundaries.append(len(self._lengths))
        self._held += sum(lengths)
        if self._held >= FLUSH_TOKENS:
            self._flush()

    def finish(self) -> None:
        """Put both files on the disk under their names."""
        self._flush()
        with open(self._paths[1] + SUFFIX, "wb", buffering=0) as index:
            for data in self._index():
                _write_all(index.fileno(), data)
            # Both files are on the disk before either gets its name; .done.json, which follows, then never refers to
            # lost data.
            os.fsync(index.fileno())
        os.fsync(self._bin.fileno())
        for path in self._paths:
            os.replace(path + SUFFIX, path)

    def _flush(self) -> None:
        if not self._pieces:
            return
        ids = np.concatenate(self._pieces)
        # Before the cast: astype(uint16) of 65536 gives 0 without an error.
        if len(ids) and (highest := int(ids.max())) >= self._vocab_size:
            raise DataError(f"the tokenizer gave the id {highest}, but says its vocabulary is {self._vocab_size}")
        _write_all(self._bin.fileno(), ids.astype(self._dtype, copy=False).data)
        self.tokens += len(ids)
        self._pieces.clear()
        self._held = 0

    def _index(self) -> list[bytes]:
        lengths = np.array(self._lengths, LENGTH)
        ends = np.cumsum(lengths, dtype=POINTER) * self._dtype.itemsize
        # Exclusive cumulative sum, as in IndexedDatasetWriter, but of a shard that fits in memory.
        pointers = ends - lengths * self._dtype.itemsize
        layout = Layout(self._dtype, len(lengths), len(self._boundaries))
        boundaries = np.array(self._boundaries, POINTER)
        return [layout.header(), lengths.tobytes(), pointers.astype(POINTER).tobytes(), boundaries.tobytes()]


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        # A raw write may take less than it was given (2 GiB at most, or up to a full disk), which buffered files hide.
        view = view[os.write(descriptor, view) :]
