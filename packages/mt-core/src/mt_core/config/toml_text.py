"""Values of a configuration written as TOML, which the standard library only reads."""

from __future__ import annotations

import json
import re
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(value: Any) -> str:
    """One value on one line, tables as inline tables. Raises ValueError for null, which TOML does not have."""
    if value is None:
        raise ValueError("TOML has no null")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also expects DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        entries = ", ".join(f"{_key(key)} = {to_toml(entry)}" for key, entry in value.items() if entry is not None)
        return f"{{{entries}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    return repr(value)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else to_toml(key)


def shown(value: Any) -> str:
    """A value for people: as TOML, and null where there is none."""
    try:
        return to_toml(value) if value is not None else "null"
    except ValueError:
        return json.dumps(value)
