"""What an engine computes and holds at the moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStatistics:
    """running, waiting: sequences. preemptions: so far. used_blocks: of the `blocks` of the cache. Tokens so far:
    queried of sequences that began, and cached ones among them; drafted, and accepted ones among them."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    used_blocks: int = 0
    blocks: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
