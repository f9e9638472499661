"""Making very many small objects without the garbage collector looking at all others again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For code that makes up to a million small tuples and no cycles: the collector would walk through all of
    torch's objects every few thousand, and take ten times as long as the rest. Also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
