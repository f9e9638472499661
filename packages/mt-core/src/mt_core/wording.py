"""Words of messages to the user."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 document", "1,200 documents": a number with its noun, which takes an s for any but one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
