"""Control of Python's garbage collector for code that allocates very many small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For code that allocates up to a million small tuples and no cycles. The collector would traverse all of
    torch's objects every few thousand allocations, ten times the cost of the rest. Also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # A caller may have disabled the collector for reasons of its own.
        if was_enabled:
            gc.enable()
