"""Databases: numbered chunks with what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.retro.project import CHUNKS, MANIFEST, DatabaseManifest
from mt_data.indexed.manifest import CheckedBlocks
from mt_data.indexed.storage import MappedFile
from mt_data.records import BlockedFile

# -- a token file as one stream ----------------------------------------------------------------------


class TokenSource(Protocol):
    """What is read of an indexed dataset (mt_data.indexed)."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    def read(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


class TokenStream:
    """Tokens by their place in the stream."""

    def __init__(self, source: TokenSource, name: str) -> None:
        self.source = source
        self.name = name
        self.ends: NDArray[np.int64] = np.cumsum(source.sequence_lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def sequences_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] places -> [n] numbers of the sequences that they are in."""
        # side="right" passes empty sequences and takes the one that begins at its predecessor's end.
        return np.searchsorted(self.ends, places, side="right")

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens [at most length] from place `start` on; fewer at the end of the stream."""
        stop = min(start + length, len(self))
        if stop <= start:
            return np.zeros(0, np.int64)
        first, last = (int(number) for number in self.sequences_at(np.array([start, stop - 1])))
        parts = []
        for number in range(first, last + 1):
            end = int(self.ends[number])
            begin = end - int(self.source.sequence_lengths[number])
            offset = max(start - begin, 0)
            parts.append(self.source.read(number, offset, min(stop, end) - begin - offset))
        return np.concatenate(parts).astype(np.int64)


class Database(Protocol):
    """What neighbours are read from. name: for messages."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int:
        """Chunks."""
        ...

    def neighbor(self, number: int, length: int) -> NDArray[np.int64]:
        """The chunk and what follows it: tokens [at most length]."""
        ...


@dataclass(frozen=True)
class StreamDatabase:
    """A token stream whose chunk n begins at token n chunk_length. What follows may be of another document."""

    stream: TokenStream
    chunk_length: int

    @property
    def name(self) -> str:
        return self.stream.name

    def __len__(self) -> int:
        return -(-len(self.stream) // self.chunk_length)

    def neighbor(self, number: int, length: int) -> NDArray[np.int64]:
        return self.stream.read(number * self.chunk_length, length)


@dataclass(frozen=True)
class ChunkDatabase:
    """The chunks of `mt retro db build`. What follows a chunk ends with its document, or before a chunk that is not in
    the database: what is held out is not read as what follows, either.

    rows: uint32 [chunks, 4] as in `DatabaseManifest`. texts: by number.
    """

    name: str
    manifest: DatabaseManifest
    rows: Rows
    texts: Sequence[TokenSource]

    def __len__(self) -> int:
        return len(self.rows)

    def neighbor(self, number: int, length: int) -> NDArray[np.int64]:
        # ceil(length / chunk_length) rows, fewer at the end of the database: as many as the tokens requested can span.
        rows = self.rows[number : number - (-length // self.manifest.job.chunk_length)].tolist()
        text, document, first, _ = rows[0]
        end = first
        for row in rows:
            # The next row follows only if it begins in the same document where this one ends; a chunk left out
            # (duplicate, blank or held out) makes a gap.
            if row[:3] != [text, document, end]:
                break
            end += row[3]
        return self.texts[text].read(document, first, min(length, end - first)).astype(np.int64)

    def tokens(self, number: int) -> NDArray[np.int64]:
        """Tokens of the chunk alone."""
        text, document, first, length = self.rows[number : number + 1].tolist()[0]
        return self.texts[text].read(document, first, length).astype(np.int64)

    def number_of(self, fingerprint: str) -> int | None:
        """The number of the text with this content; None if the database has none of it."""
        numbers = {text.fingerprint: number for number, text in enumerate(self.manifest.job.texts)}
        return numbers.get(fingerprint)


def open_chunks(
    folder: Path, manifest: DatabaseManifest, texts: Sequence[TokenSource], *, verify_checksums: bool = True
) -> ChunkDatabase:
    """Raises DataError for texts with another content than was cut into chunks, and for a file that is not the array of
    the manifest. verify_checksums: compare each block of the array at its first use."""
    for source, prefix, text in zip(texts, manifest.prefixes, manifest.job.texts, strict=True):
        if source.fingerprint() != text.fingerprint:
            raise DataError(
                f"{folder} has chunks of another text: of {prefix} when its content was "
                f"{text.fingerprint[:16]}..., it is {source.fingerprint()[:16]}... now; build a new database"
            )
    path = folder / CHUNKS
    try:
        rows: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no array in NumPy's format: {error}; build the database again") from error
    kept = manifest.counts.kept if manifest.counts else 0
    if rows.dtype != np.uint32 or rows.shape != (kept, 4):
        raise DataError(f"{path} holds {rows.dtype} {list(rows.shape)}, and its manifest says uint32 {[kept, 4]}")
    if verify_checksums:
        assert manifest.chunks is not None
        rows = CheckedRows(rows, 4, manifest.chunks, folder / MANIFEST, "copy or build the database again")
    return ChunkDatabase(str(folder), manifest, rows, texts)


# -- rows of a `.npy` file, in blocks that are compared with their checksums -------------------------


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
