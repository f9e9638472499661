"""Databases: numbered chunks with what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.retro.checked_rows import CheckedRows, Rows
from mt_data.datasets.retro.project import CHUNKS, MANIFEST, DatabaseManifest
from mt_data.datasets.retro.stream import TokenSource, TokenStream


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
        """Of the chunk alone."""
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
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no array in NumPy's format: {error}; build the database again") from error
    kept = manifest.counts.kept if manifest.counts else 0
    if rows.dtype != np.uint32 or rows.shape != (kept, 4):
        raise DataError(f"{path} holds {rows.dtype} {list(rows.shape)}, and its manifest says uint32 {[kept, 4]}")
    if verify_checksums:
        assert manifest.chunks is not None
        rows = CheckedRows(rows, 4, manifest.chunks, folder / MANIFEST, "copy or build the database again")
    return ChunkDatabase(str(folder), manifest, rows, texts)
