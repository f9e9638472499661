"""Numbers of bytes as people read and write them."""

from __future__ import annotations

import re

from mt_core.errors import ConfigError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
FACTORS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def format_bytes(num_bytes: int) -> str:
    """Such as "512 B", "1.5 KiB", "24.0 GiB"."""
    # 10 bits are a factor of 1024: the unit is found without rounding errors of a logarithm.
    exponent = min(max(num_bytes.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{num_bytes / 1024**exponent:.{1 if exponent else 0}f} {UNITS[exponent]}"


def parse_bytes(text: str, key: str) -> int:
    """The number that "5GB" (powers of 1000) or "5GiB" (powers of 1024) means.

    Raises ConfigError, which names `key`, for anything else and for less than one byte.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    factor = FACTORS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{key} {text}: not a size; write for instance 500MB, 5GB or 5GiB")
    size = int(float(match[1]) * factor)
    if size < 1:
        raise ConfigError(f"{key} {text}: a file holds at least one byte")
    return size
