"""Built indices kept on a disk, found again by what they were built from.

An entry of the cache holds one `.npy` file an array, and `manifest.json` with the arrays' shapes, dtypes and
checksums, which are verified each time. Where nothing can be written the index is built in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.content_cache import ContentCache, DamagedEntryError

Arrays = Mapping[str, NDArray[Any]]
MANIFEST = "manifest.json"
_CHUNK = 1 << 24
log = logging.getLogger(__name__)


class IndexCache:
    """Named arrays by key, in one folder; directory None keeps nothing."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def get(self, key: Mapping[str, Any], build: Callable[[], Arrays]) -> dict[str, NDArray[Any]]:
        """The arrays of `key`: read (memory-mapped, read-only, checked), or else built and written.

        key: JSON values that decide the arrays, the content fingerprint of the data among them.
        """
        if self.directory is None:
            return dict(build())
        built: dict[str, NDArray[Any]] = {}

        def write(folder: Path) -> None:
            # Kept outside: when the entry cannot be written or read back, the finished arrays are used from memory.
            built.update(build())
            _write_arrays(folder, built)

        try:
            return ContentCache(self.directory).get(key, write, _read_arrays)
        except (OSError, DamagedEntryError) as error:
            log.warning("index cache %s cannot be used (%s); the index stays in memory", self.directory, error)
            return built or dict(build())


def _write_arrays(folder: Path, arrays: Arrays) -> None:
    facts = {name: _write_array(folder / f"{name}.npy", array) for name, array in arrays.items()}
    with (folder / MANIFEST).open("w") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write_array(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    with path.open("wb") as file:
        # Into an open file, so that it can be synced; np.save closes its own.
        np.lib.format.write_array(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.str,
        "bytes": path.stat().st_size,
        "sha256": _checksum(path),
    }


def _read_arrays(folder: Path) -> dict[str, NDArray[Any]]:
    manifest = json.loads((folder / MANIFEST).read_text())
    return {name: _read_array(folder / f"{name}.npy", facts) for name, facts in manifest.items()}


def _read_array(path: Path, facts: Mapping[str, Any]) -> NDArray[Any]:
    if (size := path.stat().st_size) != facts["bytes"]:
        raise DamagedEntryError(f"{path.name} has {size} bytes in place of {facts['bytes']}")
    # Read whole once per process and index: a flipped bit would otherwise change which tokens are trained on without
    # notice.
    if (found := _checksum(path)) != facts["sha256"]:
        raise DamagedEntryError(f"{path.name} has the SHA-256 {found} in place of {facts['sha256']}")
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != facts["shape"] or array.dtype.str != facts["dtype"]:
        raise DamagedEntryError(f"{path.name} holds {array.dtype}{list(array.shape)}")
    # A plain array: indexing np.memmap costs several times as much.
    return array.view(np.ndarray)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
