"""Whether the last batches of data-parallel ranks are filled up to the same size (`even_batches`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evenly(samplers: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
    """Batch samplers fill up their last batches or not; None: as they are."""
    changed = [] if even_batches is None else [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    before = [sampler.even_batches for sampler in changed]
    for sampler in changed:
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, value in zip(changed, before, strict=True):
            sampler.even_batches = value
