"""Text files that may be compressed (.gz, .zst)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from mt_core.errors import DataError
from mt_data.preprocess.formats import detect_format, open_stream


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """newline: as of `open`. Raises DataError, also while it is read, for a file that cannot be read, is damaged or cut
    short, or is no UTF-8."""
    try:
        with open_stream(path, detect_format(path, "text-lines")) as stream:
            yield TextIOWrapper(stream, encoding="utf-8", newline=newline)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8: {error}") from error
