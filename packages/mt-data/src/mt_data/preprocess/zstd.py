"""Zstandard files, by the standard library's module (Python 3.14) or its backport, which raise EOFError when a
frame ends early (the reader of the `zstandard` package ends silently there).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from mt_core.errors import DataError


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
