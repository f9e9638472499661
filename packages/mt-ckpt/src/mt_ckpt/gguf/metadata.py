"""Values of a GGUF file's metadata, of the types that the format's description gives them.

A file says itself of which type a value is, so that any key may hold anything; some models have a list for each layer
where others have one number.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from mt_core.errors import CheckpointError

T = TypeVar("T", int, float, str, bool)
NAMES: Mapping[type, str] = {int: "integer", float: "number", str: "text", bool: "boolean"}


def value_of(values: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """None: the file does not have the key. Raises CheckpointError for a value of another type."""
    found = values.get(key)
    if found is not None and not _is_of(found, kind):
        raise CheckpointError(f"{key} is {reprlib.repr(found)}; read is one {NAMES[kind]}")
    return found


def list_of(values: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """[]: the file does not have the key. Raises CheckpointError for a value of another type."""
    found = values.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(_is_of(entry, kind) for entry in found):
        raise CheckpointError(f"{key} is {reprlib.repr(found)}; read is a list, each entry one {NAMES[kind]}")
    return found


def _is_of(value: Any, kind: type) -> bool:
    # Not isinstance: bool is a subclass of int.
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind
