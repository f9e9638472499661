"""Layers of multi-token prediction that config.json counts, and of which a folder has no tensors.

transformers leaves them out of what it saves, and keeps the count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def absent_layers(external: Mapping[str, Any], held: Mapping[str, Any]) -> list[str]:
    """A sentence for each number of layers. external: config.json. held: what the files hold of it (see
    `HuggingFaceFamily.held`)."""
    by_count: dict[tuple[int, int], list[str]] = {}
    for key, stated, present in _lowered(external, held):
        by_count.setdefault((stated, present), []).append(key)
    return [
        f"config.json: {' and '.join(f'{key}={stated}' for key in keys)}, and the files have tensors of {present} such "
        f"layers; the model is read with {present}"
        for (stated, present), keys in by_count.items()
    ]


def _lowered(external: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(key, value in config.json, value of the files) of counts that are lower in the files."""
    for key, stated in external.items():
        present = held.get(key)
        if isinstance(stated, Mapping) and isinstance(present, Mapping):
            yield from _lowered(stated, present)
        elif isinstance(stated, int) and isinstance(present, int) and present < stated:
            yield key, stated, present
