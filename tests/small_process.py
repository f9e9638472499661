"""A small process for what forks often: to fork a process copies its page tables, which takes 0.1 CPU seconds and more
in one that has run many tests, and 0.01 in a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_core.testing import run_ranks

SECONDS = 600.0


def in_small_process(function: Callable[..., object], *args: Any) -> None:
    """Call `function(*args)` in a process forked from the server of ranks; function: a module's, which fails by
    raising."""
    run_ranks(1, _without_rank, function, args, timeout=SECONDS)


def _without_rank(rank: int, world: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    function(*args)
