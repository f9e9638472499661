"""What `mt config init` asks about a person's text: whether it is UTF-8, and the key of the text in JSON lines."""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

PLAIN = (".txt", ".text", ".md", ".markdown", ".rst")
JSON_LINES = (".jsonl", ".json")
MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_CHUNK = 1 << 22


def text_files(names: Iterable[str]) -> list[Path]:
    """Uncompressed text files of names that are a file, a folder or a pattern."""
    files = [path for name in names for path in _files_of(name)]
    return [path for path in files if path.suffix.lower() in PLAIN + JSON_LINES]


def _files_of(name: str) -> Iterator[Path]:
    if Path(name).is_dir():
        return (path for path in sorted(Path(name).rglob("*")) if path.is_file())
    return (Path(path) for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file())


def size_of_files(name: str) -> int:
    """Bytes of a file, folder, pattern, or of the .bin of token files."""
    files = list(_files_of(name)) or list(_files_of(f"{name.removesuffix('.bin').removesuffix('.idx')}.bin"))
    return sum(path.stat().st_size for path in files)


def no_utf8(paths: Iterable[Path]) -> Path | None:
    """The first file that is no UTF-8 and says so by no byte order mark."""
    return next((path for path in paths if not _is_utf8(path)), None)


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        if file.read(4).startswith(MARKS):
            return True
        file.seek(0)
        try:
            while chunk := file.read(_CHUNK):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def text_keys(paths: Iterable[Path]) -> list[str]:
    """Keys of the first record of the JSON lines whose value is text, the longest text first; none without such
    files."""
    for path in paths:
        if path.suffix.lower() in JSON_LINES:
            with path.open("rb") as file:
                record = _record(file.readline())
            texts = {key: value for key, value in record.items() if isinstance(value, str)}
            return sorted(texts, key=lambda key: -len(texts[key]))
    return []


def _record(line: bytes) -> dict[str, object]:
    try:
        record = json.loads(line.decode("utf-8-sig", errors="replace"))
    except json.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) else {}
