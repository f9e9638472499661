"""Pieces of input files: how each is read, and how a line of it is named.

A shard, the unit of work that is kept when a run is interrupted, is a list of parts. Where parts are cut is
decided by the input and the options alone, never by the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from mt_core.paths import as_path
from mt_data.preprocess.encodings import UTF8
from mt_data.preprocess.formats import BUFFER_BYTES, InputFormat, detect_format, open_bytes, open_stream
from mt_data.preprocess.readers import (
    MalformedRecord,
    OnMalformed,
    Record,
    iter_lines,
    iter_records,
    parse_lines,
    skip_line,
)


@dataclass(frozen=True)
class ByteRange:
    """The lines that begin at a byte from `begin` on and before `end`, of a file that is not compressed."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class WholeFile:
    """All of a file that is read from its start: compressed, or one document of plain text."""

    path: str


@dataclass(frozen=True)
class RowGroups:
    """Row groups of a Parquet file, by number."""

    path: str
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Lines:
    """Lines already read (and decompressed) from a file; the first has the number `first_line`. encodings: of data."""

    path: str
    first_line: int
    data: bytes = field(repr=False)
    encodings: tuple[str, ...] = UTF8


Part = ByteRange | WholeFile | RowGroups | Lines


@dataclass(frozen=True)
class Shard:
    """A piece of work with an output of its own. `order` places it: (job, chunk of the job)."""

    order: tuple[int, int]
    parts: tuple[Part, ...]
    input_bytes: int

    @property
    def name(self) -> str:
        return shard_name(self.order)


def shard_name(order: tuple[int, int]) -> str:
    return f"{order[0]:06d}-{order[1]:06d}"


PLAIN_TEXTS, TEXT = ("text", "text-lines"), "text"


@dataclass(frozen=True)
class ReadOptions:
    """How parts are read."""

    input_format: str
    columns: tuple[str, ...]
    max_line_bytes: int
    encodings: tuple[str, ...] = UTF8


class PartReader:
    """Iterates over the records of a part; `reject` names one of them by its true line number in the file.

    Record numbers within a ByteRange count from its first line, since how many lines lie before it is known
    only by reading them, which is done when a line must be named.
    """

    def __init__(self, part: Part, options: ReadOptions, on_malformed: OnMalformed) -> None:
        self.part, self.options = part, options
        self._on_malformed = on_malformed
        self._start = 0
        self._lines_before: int | None = 0

    def __iter__(self) -> Iterator[Record]:
        keys = self.options.columns
        # A plain text has no key: where one is named for the files beside it, its text is what that key would hold.
        if len(keys) == 1 and detect_format(as_path(self.part.path), self.options.input_format).kind in PLAIN_TEXTS:
            return (record._replace(value={keys[0]: record.value[TEXT]}) for record in self._records())
        return self._records()

    def _records(self) -> Iterator[Record]:
        part, path = self.part, as_path(self.part.path)
        if isinstance(part, RowGroups):
            return self._row_groups(part)
        if isinstance(part, WholeFile):
            return iter_records(
                path,
                on_malformed=self._on_malformed,
                input_format=self.options.input_format,
                columns=self.options.columns,
                max_line_bytes=self.options.max_line_bytes,
                encodings=self.options.encodings,
            )
        # A range of bytes is of a file whose lines can be found without decoding it.
        encodings = part.encodings if isinstance(part, Lines) else self.options.encodings
        input_format = replace(detect_format(path, self.options.input_format), encodings=encodings)
        lines = self._byte_range(part, input_format) if isinstance(part, ByteRange) else self._lines(part)
        return parse_lines(lines, part.path, input_format, self._renumbered)

    def reject(self, line: int, reason: str) -> None:
        """Report a record of this part as unusable; `line` is its number as this reader gave it."""
        # Only here, since counting reads the file up to the range: a run without malformed lines never pays for it.
        if self._lines_before is None:
            self._lines_before = count_newlines(as_path(self.part.path), self._start)
        self._on_malformed(MalformedRecord(self.part.path, self._lines_before + line, reason))

    def _renumbered(self, error: MalformedRecord) -> None:
        self.reject(error.line, error.reason)

    def _byte_range(self, part: ByteRange, input_format: InputFormat) -> Iterator[tuple[int, bytes]]:
        with open_stream(as_path(part.path), input_format) as stream:
            self._start = seek_line_start(stream, part.begin, part.end)
            # None: unknown. Line numbers of this part count from 1 at its first line until `reject` has counted those
            # before.
            self._lines_before = None
            yield from iter_lines(
                stream,
                part.path,
                self._renumbered,
                self.options.max_line_bytes,
                # Negative when a line of the range before reaches past this whole range: nothing is read then.
                until=part.end - self._start,
            )

    def _lines(self, part: Lines) -> Iterator[tuple[int, bytes]]:
        stream = BytesIO(part.data)
        return iter_lines(stream, part.path, self._renumbered, self.options.max_line_bytes, first_line=part.first_line)

    def _row_groups(self, part: RowGroups) -> Iterator[Record]:
        from mt_data.preprocess.formats import iter_rows, open_parquet

        path = as_path(part.path)
        with open_parquet(path) as file:
            for row, value in iter_rows(file, path, self.options.columns, part.groups):
                yield Record(value, part.path, row)


def seek_line_start(stream: BinaryIO, begin: int, end: int) -> int:
    """Move to the first line that begins at `begin` or later; its position (past `end` if none begins before)."""
    if begin == 0:
        return 0
    # From one byte before: if that byte is a newline, a line begins exactly at `begin` and belongs to this range; else
    # the line under way belongs to the range before, and is skipped. Each line is so read by exactly one range.
    stream.seek(begin - 1)
    # The limit stops the search at the end of the range, so that a line of some GB is not read from its start to its
    # end by each range that it crosses.
    return begin - 1 + skip_line(stream, limit=end - begin + 1)


def count_newlines(path: Path, end: int) -> int:
    """Line ends among the first `end` bytes of a file."""
    count, left = 0, end
    with open_bytes(path) as file:
        while left and (block := file.read(min(left, BUFFER_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count
