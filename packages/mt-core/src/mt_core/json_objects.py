"""JSON whose objects name each key once."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """A key that stands twice in one object, of which Python's reader would keep the last."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises DuplicateKeyError, json.JSONDecodeError and RecursionError."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise DuplicateKeyError(f"the key {_first_repeated(pairs)!r} stands twice in one object; keep one of the two")
    return table


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return key
