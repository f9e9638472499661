"""How the values of a tensor are stored, of formats that quantize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class StoredFormat:
    """format: for people, such as `e4m3, blocks of 128 x 128`, or a dtype. num_bytes: in the files, scales included.
    quantized: whether values are codes that scales belong to."""

    format: str
    num_bytes: int
    quantized: bool


@runtime_checkable
class SupportsStoredFormats(Protocol):
    """A `CheckpointReader` that knows how its tensors are stored."""

    def stored_formats(self) -> Mapping[str, StoredFormat]:
        """Canonical name -> how it is stored. No tensor is read."""
        ...
