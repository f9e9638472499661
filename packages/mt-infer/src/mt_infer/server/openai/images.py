"""Images of requests, from their URLs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.pixels import decode_image
from mt_infer.server.errors import ApiError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""OpenAI's. Pillow decodes some others with programs of their own."""
MAX_PIXELS = 32_000_000
"""Of an image; a small file may hold many."""


def read_image_urls(urls: Sequence[str], folders: Sequence[Path]) -> Iterator[NDArray[np.uint8]]:
    """uint8 [height, width, 3] each, decoded when it is taken. folders: those that file: URLs may name. Raises ApiError
    for all other URLs, and for what is no image."""
    return (_read(url, f"messages: image {number}", folders) for number, url in enumerate(urls, 1))


def _read(url: str, name: str, folders: Sequence[Path]) -> NDArray[np.uint8]:
    source = BytesIO(_data(url, name)) if url.startswith("data:") else _file(url, name, folders)
    try:
        return decode_image(source, name, FORMATS, MAX_PIXELS)
    except DataError as error:
        raise _refused(str(error)) from error


def _data(url: str, name: str) -> bytes:
    """Of data:image/...;base64,... (RFC 2397)."""
    head, _, encoded = url.removeprefix("data:").partition(",")
    if not head.startswith("image/") or not head.endswith(";base64"):
        raise _refused(f"{name} is data:{head[:50]}; it must be data:image/...;base64, with the file behind the comma")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"{name} is not valid base64: {error}") from error


def _file(url: str, name: str, folders: Sequence[Path]) -> Path:
    try:
        path = _path_of(url)
    except ValueError as error:
        raise _refused(f"{name} is at {url[:50]!r}, which is no URL: {error}") from error
    if path is None:
        raise _refused(
            f"{name} is at {url[:50]!r}, which this server does not fetch; send it as data:image/...;base64,..."
        )
    # After links and `..` are resolved: a link inside the folder that leads outside is refused.
    if not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise _refused(
            f"{name} is a file outside the folders that this server reads images from (--allowed-local-media-path "
            "of mt serve); send it as data:image/...;base64,..."
        )
    return path


def _path_of(url: str) -> Path | None:
    """Of a file: URL, without links and `..`; None for others. Raises ValueError for what is no URL or no path."""
    parts = urlsplit(url)
    # http: URLs are never fetched: a request could reach addresses inside the server's network.
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path)).resolve()


def _refused(message: str) -> ApiError:
    return ApiError(message, param="messages")
