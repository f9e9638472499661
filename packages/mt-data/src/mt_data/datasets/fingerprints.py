"""Fingerprints of what data sets are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from mt_core.errors import DataError


def combined(parts: Sequence[Any]) -> str:
    """SHA-256 (hexadecimal) over JSON values, in their order."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 (hexadecimal) of a file. Raises DataError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
