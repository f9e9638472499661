"""Zstandard files, by the standard library's module (Python 3.14) or its backport.

Both raise EOFError when a frame ends early; the reader of the `zstandard` package ends silently there.
"""

from __future__ import annotations

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
    module = _zstd_module(path)
    try:
        with module.open(raw, "rb") as stream:
            yield cast(BinaryIO, stream)
    except module.ZstdError as error:
        message = f"{path} is damaged Zstandard data, or needs a window over 128 MiB ({error})"
        raise DataError(message) from error


def _zstd_module(path: Path) -> ModuleType:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise DataError(f"{path} needs a Zstandard reader (pip install backports.zstd, or mt-data[zstd])")
