"""Reading corpora: JSON lines (plain, gzip, Zstandard), Parquet and plain text, as a stream of records.

Every record has the file and line it came from, so that whatever is wrong with it later can be named.
Memory does not depend on the size of a file: one line, or one small batch of Parquet rows, is held at a time.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from mt_core.errors import DataError
from mt_core.paths import as_path
from mt_data.preprocess.encodings import (
    UTF8,
    UTF16_FORMS,
    UndecodableError,
    decode,
    encoding_advice,
    is_utf8,
    utf16_without_mark,
)
from mt_data.preprocess.formats import ENDINGS, InputFormat, detect_format, examine_format, open_stream

MAX_LINE_BYTES = 256 * 2**20
"""A longer line (or text file) is malformed, unless the caller allows more: it bounds memory."""


# Types of values in which orjson cannot have changed a number: it returns integers past 64 bits as floats, so only a
# float, or a list or object that may hold one, makes a second parse necessary.
_EXACT_TYPES = {str, int, bool, type(None)}
# orjson is exact from -2^63 to 2^64 - 1, and 2^63 has 19 digits: a shorter run of digits is never out of range.
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


NULS_IN_JSON = (
    "has a NUL byte, which JSON does not allow: a part of the file was never written, or it is UTF-16 without a mark; "
    "leave such lines out (of mt data preprocess: --on-error skip), write the character as \\u0000, or {}"
)
NULS = "has a NUL character: it is no text, or UTF-16 without a mark; leave the file out, or {}"


def _with_form(sentence: str, data: bytes) -> str:
    """A sentence about NULs that ends with the encoding that the bytes seem to be in."""
    return sentence.format(encoding_advice(utf16_without_mark(data) or UTF16_FORMS[0]))


class Record(NamedTuple):
    """One document's fields and its place. `line` counts from 1; in Parquet it is the row."""

    value: dict[str, Any]
    file: str
    line: int


class MalformedRecord(DataError):  # noqa: N818 - collected more often than raised
    """One line that cannot be used; the lines after it can. Carries `file`, `line` and `reason`."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        # All arguments in `args`: pickle, which brings the error back from a worker process, calls the class with them.
        super().__init__(file, line, reason)
        self.file, self.line, self.reason = file, line, reason

    def __str__(self) -> str:
        unit = "row" if self.file.endswith(".parquet") else "line"
        return f"{self.file}, {unit} {self.line}: {self.reason}"


OnMalformed = Callable[[MalformedRecord], None]
"""Called with each line that cannot be used; reading goes on after it unless the call raises."""


def raise_malformed(error: MalformedRecord) -> None:
    """The default `OnMalformed`: the first unusable line ends the reading."""
    raise error


def expand_globs(patterns: Iterable[str | Path], input_format: str = "auto") -> list[Path]:
    """The files that the patterns (`*`, `?`, `[...]`, `**`) match, sorted within each pattern.

    A folder stands for all text below it (`folders.text_files_below`).

    A pattern with `://`, such as "s3://bucket/*.jsonl", is looked for through fsspec. Patterns keep their order, and a
    file that several match is taken once, at the first of them.
    Raises DataError when a pattern matches nothing, or folders alone.
    """
    # A dict for its order; a set would lose which pattern came first.
    paths: dict[Path, None] = {}
    for pattern in patterns:
        text = str(pattern)
        matches = _remote_matches(text) if "://" in text else _local_matches(text)
        if matches == [Path(text)] and Path(text).is_dir():
            matches = text_files_below(Path(text), input_format)
        files = [match for match in matches if not match.is_dir()]
        if not files:
            what = f"matches folders alone; give {text.rstrip('/')}/*" if matches else "matches no file"
            raise DataError(f"input {text!r} {what}")
        paths.update(dict.fromkeys(files))
    if not paths:
        raise DataError("no input given; name at least one file or pattern")
    return list(paths)


def _local_matches(pattern: str) -> list[Path]:
    # An existing file first: its name may hold characters of patterns, such as "[". Sorted, since glob gives the order
    # of the directory, which differs between file systems.
    matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
    return [Path(match) for match in matches]


def _remote_matches(pattern: str) -> list[Path]:
    """Raises DataError when the store cannot be reached."""
    path = as_path(pattern)
    try:
        if path.exists():
            return [path]
        store: Any = path.fs  # type: ignore[attr-defined]
        return [as_path(store.unstrip_protocol(match)) for match in sorted(store.glob(path.path))]  # type: ignore[attr-defined]
    except OSError as error:
        raise DataError(f"input {pattern!r} cannot be looked for: {error}") from error


def iter_documents(
    paths: Iterable[str | Path], *, on_malformed: OnMalformed = raise_malformed, input_format: str = "auto"
) -> Iterator[Record]:
    """The records of several files, one file after the other; see `iter_records`."""
    for path in paths:
        yield from iter_records(path, on_malformed=on_malformed, input_format=input_format)


def iter_records(
    path: str | Path,
    *,
    on_malformed: OnMalformed = raise_malformed,
    input_format: str = "auto",
    columns: Iterable[str] | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    encodings: tuple[str, ...] = UTF8,
) -> Iterator[Record]:
    """Stream the records of one file.

    input_format: "auto" goes by the name's ending; see `formats.detect_format`. columns: the only Parquet
    columns to read (JSON lines always give all keys). A plain text file is one record {"text": content}.
    encodings: tried in turn on a text, or on each line; a byte order mark goes before them.

    Raises MalformedRecord (unless `on_malformed` takes it) for a line that is no JSON object or too long, and
    DataError for what cannot be skipped: a missing file, a compressed file cut short, a missing column.
    """
    path = as_path(path)
    detected = examine_format(path, input_format, encodings)
    if detected.kind == "parquet":
        yield from _parquet_records(path, columns)
    elif detected.kind == "text":
        yield from _text_file_record(path, detected, on_malformed, max_line_bytes)
    else:
        with open_stream(path, detected) as stream:
            lines = iter_lines(stream, str(path), on_malformed, max_line_bytes)
            yield from parse_lines(lines, str(path), detected, on_malformed)


def parse_lines(
    lines: Iterable[tuple[int, bytes]], file: str, input_format: InputFormat, on_malformed: OnMalformed
) -> Iterator[Record]:
    """The records of numbered lines; blank lines are passed over."""
    parse = parse_json_line if input_format.kind == "jsonl" else parse_text_line
    for number, line in lines:
        try:
            value = parse(line, input_format.encodings)
        except ValueError as error:
            on_malformed(MalformedRecord(file, number, str(error)))
            continue
        if value is not None:
            yield Record(value, file, number)


def iter_lines(
    stream: BinaryIO,
    file: str,
    on_malformed: OnMalformed = raise_malformed,
    max_line_bytes: int = MAX_LINE_BYTES,
    first_line: int = 1,
    until: int | None = None,
) -> Iterator[tuple[int, bytes]]:
    """(line number, line with its newline) of a binary stream. Too long a line is passed over unread.

    until: only lines that begin within so many bytes from here.
    """
    number, passed = first_line, 0
    # One byte more than allowed: a result of that length without a newline is too long, with one it is just within.
    while (until is None or passed < until) and (line := stream.readline(max_line_bytes + 1)):
        passed += len(line)
        if len(line) > max_line_bytes and not line.endswith(b"\n"):
            passed += skip_line(stream)
            on_malformed(MalformedRecord(file, number, too_long(max_line_bytes)))
        else:
            yield number, line
        number += 1


def skip_line(stream: BinaryIO, limit: int | None = None) -> int:
    """Read to behind the next newline (or the end, or until `limit` bytes were passed); the bytes passed."""
    passed = 0
    while limit is None or passed < limit:
        # In pieces, so that a line without end takes no memory. The limit is compared between pieces and may be passed
        # by one.
        piece = stream.readline(2**20)
        passed += len(piece)
        if not piece or piece.endswith(b"\n"):
            break
    return passed


def too_long(max_line_bytes: int) -> str:
    return f"is longer than {max_line_bytes} bytes; allow more with --max-line-bytes, or leave it out"


def parse_json_line(line: bytes, encodings: Sequence[str] = UTF8) -> dict[str, Any] | None:
    """The object on a line of JSON. orjson first; what it refuses and Python's reader takes (NaN, lone
    surrogates, integers past 64 bits) is taken too, since Megatron reads with Python's."""
    # orjson reads UTF-8 alone, which text in another encoding can be by chance.
    if not is_utf8(encodings[0]):
        line = decode(line, encodings).encode("utf-8", "surrogatepass")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Looked at only after orjson failed: blank lines are rare, and strip copies every line.
        if not line.strip():
            return None
        value = _parse_as_python_does(line, encodings)
    if type(value) is not dict:
        raise ValueError(
            f'is {json_kind(value)}; each line must be a JSON object such as {{"text": "..."}}{_array_remedy(value)}'
        )
    return _parse_as_python_does(line, encodings) if _may_hold_long_integers(value, line) else value


def _array_remedy(value: object) -> str:
    """For a file that is one array, which many programs write under the ending .json."""
    return "; jq -c '.[]' makes lines of an array" if isinstance(value, list) else ""


def _may_hold_long_integers(value: dict[str, Any], line: bytes) -> bool:
    """Whether orjson may have made a float of an integer past 64 bits, somewhere in the record."""
    # The types first: most corpora have texts and integers at the top level alone, and the search reads the whole line.
    return not _EXACT_TYPES.issuperset(map(type, value.values())) and bool(_LONG_NUMBER.search(line))


def json_kind(value: object) -> str:
    """A value of JSON in words, for messages."""
    kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return kinds.get(type(value), "a number")


def _parse_as_python_does(line: bytes, encodings: Sequence[str]) -> Any:
    text = decode(line, encodings)  # without the mark that is part of a file's first line
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if "\0" in text:
            raise ValueError(_with_form(NULS_IN_JSON, line)) from error
        raise ValueError(
            f"is no JSON ({error.msg} at column {error.colno}); each line must be a JSON object{_array_begin(text)}"
        ) from error
    except RecursionError as error:
        raise ValueError("is JSON nested too deeply") from error


def _array_begin(text: str) -> str:
    """For the first line of an object, or an array of objects, that is written over several lines."""
    return "; jq -c . (or .[] of an array) makes lines of it" if text.strip() in ("{", "[", "[{") else ""


def parse_text_line(line: bytes, encodings: Sequence[str] = UTF8) -> dict[str, Any] | None:
    """A line of text as a document of its own, without its line end."""
    # Other white space stays: it belongs to the document.
    return {"text": decode(line, encodings).rstrip("\r\n")}


def _text_file_record(
    path: Path, input_format: InputFormat, on_malformed: OnMalformed, max_bytes: int
) -> Iterator[Record]:
    with open_stream(path, input_format) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        on_malformed(MalformedRecord(str(path), 1, too_long(max_bytes)))
        return
    try:
        text = decode(data, input_format.encodings)
    except UndecodableError as error:
        on_malformed(MalformedRecord(str(path), data.count(b"\n", 0, error.start) + 1, str(error)))
        return
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        on_malformed(MalformedRecord(str(path), line, _with_form(NULS, data)))
        return
    yield Record({"text": text}, str(path), 1)


def _parquet_records(path: Path, columns: Iterable[str] | None) -> Iterator[Record]:
    from mt_data.preprocess.formats import iter_rows, open_parquet

    with open_parquet(path) as file:
        for row, value in iter_rows(file, path, columns):
            yield Record(value, str(path), row)


# -- text files below a folder -----------------------------------------------------------------------

RUN = "config-origins.json"
"""Is in each run directory of mt train, whose logs and metrics are no text to train on."""
CACHE = ("cache", "mt")
"""Where tokens of raw text are kept, by default beside the text."""
log = logging.getLogger(__name__)


def text_files_below(folder: Path, input_format: str = "auto") -> list[Path]:
    """All files of a known ending below a folder, or all files where the format is named, by name.

    Left out: hidden files and folders, caches and runs of mt, manifests of token files. Files of other endings are
    counted in a message of the log. Raises DataError where no file is left.
    """
    taken, others = [], Counter[str]()
    for path in sorted(_files_below(folder)):
        if input_format != "auto" or _is_known(path):
            taken.append(path)
        else:
            others[path.suffix or "no ending"] += 1
    left_out = ", ".join(f"{ending} ({count})" for ending, count in others.most_common(8))
    if not taken:
        raise DataError(
            f"{folder} has no text: {f'its files end in {left_out}' if others else 'no file is in it'}; text ends in "
            f"{', '.join(ENDINGS)} (also .gz, .zst), and --input-format text (data.input_format) takes all files"
        )
    if others:
        log.warning("%s: %d files are read, files of other endings are left out: %s", folder, len(taken), left_out)
    return taken


def _is_known(path: Path) -> bool:
    try:
        detect_format(path)
    except DataError:
        return False
    return not path.name.endswith(".manifest.json")


def _files_below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        if RUN in files:
            folders.clear()
            continue
        hidden = [name for name in folders if name.startswith(".") or (Path(place).name, name) == CACHE]
        folders[:] = [name for name in folders if name not in hidden]
        yield from (Path(place, name) for name in files if not name.startswith("."))
