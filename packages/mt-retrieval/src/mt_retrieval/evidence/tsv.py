"""Passages from a tab-separated file with the columns id, text and title: DPR's psgs_w100.tsv.

The first line names the columns. Fields may be in double quotes, as Python's csv module writes them. Only the offsets
of the rows are kept in memory (8 bytes each).
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from mt_core.errors import DataError
from mt_core.specs import Tokenizer
from mt_data.datasets.labelled_texts import INT64_DIGITS
from mt_data.datasets.text_files import bare_encoder
from mt_data.preprocess.formats import COMPRESSIONS
from mt_retrieval.evidence.passages import Passage

COLUMNS = ("id", "text", "title")


class TSVEvidence:
    """Raises DataError for a file that is not readable, has other columns, or has no passages."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None = None) -> None:
        self.name = str(path)
        self._encode = None if tokenizer is None else bare_encoder(tokenizer)
        self._file = _opened(path)
        self._offsets = array("q")
        self._digest = sha256()
        try:
            self._columns = self._read_offsets()
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path}, row {len(self._offsets) + 1}: {error}") from error
        if not self._offsets:
            raise DataError(f"{path} has no passages behind its first line")

    def __len__(self) -> int:
        return len(self._offsets)

    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def passage(self, row: int) -> Passage:
        """Raises DataError for a row without its fields, or whose id is no number of int64."""
        # One open file and one position: not for several threads at a time.
        self._file.seek(self._offsets[row])
        fields = next(_records(_lines(self._file)))
        where = f"{self.name}, passage {row + 1}"
        if len(fields) < len(self._columns):
            raise DataError(f"{where} has {len(fields)} fields, must have {', '.join(self._columns)}")
        # strict=False: a line may have more columns than are named.
        values = dict(zip(self._columns, fields, strict=False))
        if not values["id"].isdecimal() or len(values["id"]) > INT64_DIGITS:
            raise DataError(f"{where} has the id {values['id']!r}, which is no number of at most {INT64_DIGITS} digits")
        return Passage(int(values["id"]), values["text"], values["title"])

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        assert self._encode is not None
        passage = self.passage(row)
        return self._encode(passage.title), self._encode(passage.text)

    def _read_offsets(self) -> list[str]:
        """Fills offsets and digest; returns the names of the columns."""
        place = 0

        def counted() -> Iterator[bytes]:
            nonlocal place
            # place counts what the csv reader has consumed: it takes lines one at a time, so that `place` is the end of
            # the record that it returned.
            for line in self._file:
                place += len(line)
                self._digest.update(line)
                yield line

        records = _records(counted())
        columns = _checked_columns(next(records, []), self.name)
        start = place
        for record in records:
            if record:  # a blank line gives an empty record
                self._offsets.append(start)
            start = place
        return columns


def _checked_columns(columns: list[str], name: str) -> list[str]:
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise DataError(
            f"{name}, line 1: there is no column {', '.join(missing)}; the first line must name id, text and title, "
            f"separated by tabs. It names {', '.join(columns) or 'nothing'}"
        )
    return columns


def _opened(path: Path) -> BinaryIO:
    if path.suffix in COMPRESSIONS:
        raise DataError(f"{path} is compressed, and passages are read at random places; decompress it first")
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"the evidence {path} cannot be read: {error.strerror}") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    yield from iter(file.readline, b"")


def _records(lines: Iterator[bytes]) -> Iterator[list[str]]:
    """A record may go over several lines, inside of quotes."""
    return csv.reader((line.decode("utf-8") for line in lines), delimiter="\t")
