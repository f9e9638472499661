"""Lines of JSON in a file that may be growing, and may be written again from its beginning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

CHUNK = 4_000_000
"""Bytes that are read at once."""


class JsonLines:
    """Reads what was added since the last call. `restarts` counts how often the file was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._offset = 0
        self._file_number = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Objects of complete lines. None where the file does not exist."""
        self.look()
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset)
            while lines := file.readlines(CHUNK):
                if not lines[-1].endswith(b"\n"):
                    lines.pop()
                self._offset += sum(map(len, lines))
                yield from objects(lines)
                if not lines:
                    return

    def look(self) -> None:
        """Begin again if the file was replaced or cut."""
        try:
            state = self.path.stat()
        except OSError:
            return
        if state.st_ino != self._file_number or state.st_size < self._offset:
            self.restarts += self._offset > 0
            self._offset, self._file_number = 0, state.st_ino


def objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Lines that are no JSON object are skipped, as an interrupted write leaves them."""
    for line in lines:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            value = _with_nan(line)
        if isinstance(value, dict):
            yield value


def _with_nan(line: bytes) -> Any:
    """Python writes NaN and Infinity, which are no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_json(path: Path) -> Any:
    """None where the file is missing or is being written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
