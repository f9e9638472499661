"""Numbers of bytes as people read them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """Such as "512 B", "1.5 KiB", "24.0 GiB"."""
    exponent = min(max(num_bytes.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{num_bytes / 1024**exponent:.{1 if exponent else 0}f} {UNITS[exponent]}"
