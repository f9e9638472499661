"""Examples from files: JSON lines, one JSON array, Parquet (also gzip and Zstandard), and text files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mt_core.errors import DataError
from mt_core.paths import as_path
from mt_data.preprocess.formats import InputFormat, examine_format, open_stream
from mt_data.preprocess.readers import MalformedRecord, Record, iter_records

OnBadLine = Callable[[int, DataError], None]
"""Called with the number of a line that cannot be used, and why; reading goes on after it unless the call raises."""
ExampleT = TypeVar("ExampleT", covariant=True)
_LOOK = 4096
_SPACE = " \t\r\n"


def raise_bad_line(line: int, error: DataError) -> None:
    """The default: the first unusable line ends the reading."""
    raise error


class ReadsRecords(Protocol[ExampleT]):
    """Turns records into examples, as `RecordReader` does."""

    def example(self, record: Record) -> ExampleT: ...


def read_examples(
    path: Path, reader: ReadsRecords[ExampleT], on_bad_line: OnBadLine = raise_bad_line
) -> Iterator[ExampleT]:
    """The examples of a file, in order.

    `on_bad_line` is given the DataError, with file and line, for a line that is no JSON object and a record that
    `reader` refuses. It raises it by default. A file that cannot be read, or is cut short, is a DataError always.
    """

    def malformed(error: MalformedRecord) -> None:
        on_bad_line(error.line, error)

    for record in _records(path, malformed):
        try:
            example = reader.example(record)
        except DataError as error:
            on_bad_line(record.line, error)
        else:
            yield example


def _records(path: Path, on_malformed: Callable[[MalformedRecord], None]) -> Iterator[Record]:
    input_format = examine_format(as_path(path))
    if input_format.kind == "jsonl" and _is_array(path, input_format):
        return _array_records(path, input_format, on_malformed)
    return iter_records(path, on_malformed=on_malformed)


def _is_array(path: Path, input_format: InputFormat) -> bool:
    """Whether the file is one JSON array of objects."""
    with open_stream(as_path(path), input_format) as stream:
        begin = stream.read(_LOOK).removeprefix(b"\xef\xbb\xbf").lstrip()
    return begin.startswith(b"[") and begin[1:].lstrip().startswith(b"{")


def _array_records(
    path: Path, input_format: InputFormat, on_malformed: Callable[[MalformedRecord], None]
) -> Iterator[Record]:
    """The objects of an array, one parsed after the other, each with the line that it begins on."""
    with open_stream(as_path(path), input_format) as stream:
        try:
            text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8: {error}; write it as UTF-8, or as JSON lines") from error
    decoder, place, line = json.JSONDecoder(), text.index("[") + 1, 1
    counted = 0
    while text[(place := _behind_space(text, place)) : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        value, place = _value(decoder, text, place, str(path), line)
        if isinstance(value, dict):
            yield Record(value, str(path), line)
        else:
            on_malformed(MalformedRecord(str(path), line, "is no JSON object"))
        place = _behind_space(text, place)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "]":
            raise DataError(f"{path}: a comma or ] is missing behind the object of line {line}")
    if text[place + 1 :].strip():
        raise DataError(f"{path} goes on behind the array that it begins with; write one array, or an object a line")


def _value(decoder: json.JSONDecoder, text: str, place: int, path: str, line: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}: is no JSON ({error})") from error


def _behind_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place
