"""Options of the dispatcher. Without torch: they are read before anything is built."""

from __future__ import annotations

from mt_core.config import PositiveInt, Section


class CountedConfig(Section):
    """Sends as alltoall does, and counts."""

    path: str = "traffic.jsonl"
    """File of counts; a rank appends `.rank` with its number among the ranks that hold the experts."""
    every: PositiveInt = 1
    """Dispatches from one line to the next."""
