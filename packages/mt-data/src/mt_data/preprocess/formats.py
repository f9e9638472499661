"""Formats of files: which one a file has, its bytes without compression, and Parquet's rows."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO, cast

from mt_core.errors import DataError
from mt_core.paths import is_remote
from mt_data.preprocess.encodings import MARK_BYTES, UTF8, Utf8Reader, keeps_lines, marked_encoding

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile


Kind = Literal["jsonl", "text-lines", "text", "parquet"]
Compression = Literal["gz", "zst"]
ENDINGS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}
"""What compressed data begins with, whatever the file is called."""
BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class InputFormat:
    """kind: "jsonl" has an object a line, "text-lines" a document a line, "text" is one document.

    encodings: of what `open_stream` gives, tried in turn. recoded_from: the encoding of the file, which `open_stream`
    turns into UTF-8; None where it gives the bytes as they are.
    """

    kind: Kind
    compression: Compression | None = None
    encodings: tuple[str, ...] = UTF8
    recoded_from: str | None = None

    @property
    def divisible(self) -> bool:
        """Whether reading can begin anywhere in the file: it is lines, and not compressed."""
        return self.compression is None and self.recoded_from is None and self.kind in ("jsonl", "text-lines")


def examine_format(path: Path, input_format: str = "auto", encodings: tuple[str, ...] = UTF8) -> InputFormat:
    """Like `detect_format`, with what the file's first bytes say: compression that its name does not, and the encoding.

    Raises DataError also for a file that cannot be read.
    """
    detected = replace(detect_format(path, input_format), encodings=encodings)
    if detected.kind == "parquet":
        return detected
    if detected.compression is None:
        begin = _first_bytes(path, detected)
        detected = replace(detected, compression=next((MAGIC[mark] for mark in MAGIC if begin.startswith(mark)), None))
    # A whole text is decoded at once; lines are found by the byte of a newline, which UTF-16 does not have.
    if detected.kind == "text":
        return detected
    name = marked_encoding(_first_bytes(path, detected)) or encodings[0]
    return detected if keeps_lines(name) else replace(detected, encodings=UTF8, recoded_from=name)


def _first_bytes(path: Path, input_format: InputFormat) -> bytes:
    with open_stream(path, input_format) as stream:
        return stream.read(MARK_BYTES)


def detect_format(path: Path, input_format: str = "auto") -> InputFormat:
    """The format by the name's ending (`.jsonl.gz`, `.parquet`, ...), or the one named, for any ending.

    Compression goes by the ending `.gz` or `.zst`. Raises DataError for an unknown ending.
    """
    compression = COMPRESSIONS.get(path.suffix.lower())
    inner = path.with_suffix("") if compression else path
    if input_format != "auto":
        if input_format not in ENDINGS.values() and input_format != "text-lines":
            raise DataError(f"input format {input_format!r} is not known; give {format_names()}")
        kind = cast(Kind, input_format)
    elif inner.suffix.lower() in ENDINGS:
        kind = ENDINGS[inner.suffix.lower()]
    else:
        raise DataError(
            f"{path}: the ending says no format that is known ({', '.join(ENDINGS)}, also with .gz or .zst); "
            f"name it with --input-format {format_names()} (data.input_format)"
        )
    if kind == "parquet" and compression:
        raise DataError(f"{path}: Parquet is compressed inside; decompress the {path.suffix} first")
    return InputFormat(kind, compression)


def format_names() -> str:
    return "jsonl, text, text-lines or parquet"


@contextmanager
def open_stream(path: Path, input_format: InputFormat) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file, buffered.

    Raises DataError, naming the file, when it cannot be read or its compressed data ends early or is damaged.
    """
    with open_with_raw(path, input_format) as (stream, _):
        yield stream


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A text file, compressed by its ending .gz or .zst. newline: as of `open`.

    Raises DataError, also while it is read, for a file that cannot be read, is damaged or cut short, or is no UTF-8.
    """
    try:
        with open_stream(path, detect_format(path, "text-lines")) as stream:
            # Not closed here: closing the wrapper would close the stream beneath, which open_stream owns.
            yield TextIOWrapper(stream, encoding="utf-8", newline=newline)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8: {error}") from error


@contextmanager
def open_with_raw(path: Path, input_format: InputFormat) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(decompressed stream, the file beneath it, whose `tell` says how far it was read). Raises as `open_stream`."""
    try:
        with open_bytes(path) as raw:
            # gzip reads an empty file as empty data without an error; an interrupted copy often leaves just that.
            if input_format.compression and path.stat().st_size == 0:
                raise DataError(f"{path} was cut short: it is empty, which compressed data never is")
            with _decompressed(raw, path, input_format) as stream:
                yield _recoded(stream, path, input_format), raw
    # These clauses also see what the body of the caller's `with` raises while it reads, since a stream fails only then.
    except EOFError as error:
        raise DataError(f"{path} was cut short: its compressed data ends too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged gzip data ({error})") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def open_bytes(path: Path) -> BinaryIO:
    """A file, or an object of a store, for reading from any place on. Raises OSError."""
    # Files of fsspec have a read-ahead of their own.
    return path.open("rb") if is_remote(path) else path.open("rb", buffering=BUFFER_BYTES)


def _recoded(stream: BinaryIO, path: Path, input_format: InputFormat) -> BinaryIO:
    if input_format.recoded_from is None:
        return stream
    return BufferedReader(Utf8Reader(stream, input_format.recoded_from, path), BUFFER_BYTES)


@contextmanager
def _decompressed(raw: BinaryIO, path: Path, input_format: InputFormat) -> Iterator[BinaryIO]:
    if input_format.compression == "gz":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield BufferedReader(cast(RawIOBase, stream), BUFFER_BYTES)
    elif input_format.compression == "zst":
        with open_zstd(raw, path) as stream:
            yield BufferedReader(cast(RawIOBase, stream), BUFFER_BYTES)
    else:
        yield raw


# -- Zstandard ---------------------------------------------------------------------------------------
#
# By the standard library's module (Python 3.14) or its backport, which raise EOFError when a frame ends early (the
# reader of the `zstandard` package ends silently there).


@contextmanager
def open_zstd(raw: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of an open file of one or more frames. DataError when its data is damaged."""
    module = _zstd_module()
    try:
        with module.open(raw, "rb") as stream:
            yield cast(BinaryIO, stream)
    except module.ZstdError as error:
        message = f"{path} is damaged Zstandard data, or needs a window over 128 MiB ({error})"
        raise DataError(message) from error


def create_zstd(raw: BinaryIO) -> BinaryIO:
    """A stream that compresses into an open file and, when closed, ends the frame but leaves the file open."""
    return cast(BinaryIO, _zstd_module().open(raw, "wb"))


def _zstd_module() -> ModuleType:
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


# -- Parquet -----------------------------------------------------------------------------------------

# Rows of a corpus can be documents of some MB, so a batch of pyarrow's default size (65536 rows) may not fit in memory.
BATCH_ROWS = 128


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetFile]:
    """An open file, read through a buffer instead of a row group at once. DataError names file and cause."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise DataError(f"{path} needs pyarrow (pip install pyarrow, or mt-data[parquet])") from error
    try:
        # pre_buffer would read the column chunks of a row group into memory before the first row.
        with open_bytes(path) as raw, pq.ParquetFile(raw, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def iter_rows(
    file: ParquetFile,
    path: Path,
    columns: Iterable[str] | None = None,
    row_groups: Sequence[int] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row counted from 1 over the whole file, its columns). `row_groups` picks some of the file's."""
    names = check_columns(file, path, columns)
    groups = range(file.num_row_groups) if row_groups is None else row_groups
    for group in groups:
        row = 1 + first_row(file, group)
        # use_threads=False: the parallelism is one process a core already.
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=names, use_threads=False):
            for value in batch.to_pylist():
                yield row, value
                row += 1


def first_row(file: ParquetFile, group: int) -> int:
    return sum(file.metadata.row_group(before).num_rows for before in range(group))


def check_columns(file: ParquetFile, path: Path, columns: Iterable[str] | None) -> list[str] | None:
    """The columns as a list; DataError when the file lacks one."""
    if columns is None:
        return None
    names = list(columns)
    for name in names:
        if name not in file.schema_arrow.names:
            raise DataError(
                f'{path} has no column "{name}"; its columns are {", ".join(file.schema_arrow.names)} '
                "(--json-keys names what to read)"
            )
    return names
