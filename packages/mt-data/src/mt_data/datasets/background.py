"""Working ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


def run_ahead(executor: Executor, iterator: Iterator[T]) -> Iterator[T]:
    """What `iterator` yields, computed in `executor` from now on; its exception is raised here."""
    # Not bounded: the producer never waits, so an abandoned consumer cannot block the executor's shutdown.
    queue: SimpleQueue[T] = SimpleQueue()

    def work() -> None:
        try:
            for item in iterator:
                queue.put(item)
        finally:
            # After an error too, so that the consumer wakes up; result() then raises it there.
            queue.put(_END)

    future = executor.submit(work)

    def items() -> Iterator[T]:
        while (item := queue.get()) is not _END:
            yield item
        future.result()

    return items()
