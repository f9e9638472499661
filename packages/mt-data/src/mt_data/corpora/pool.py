"""A pool of processes that ends with its parent and answers in order."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from mt_core.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """Fresh processes (not forks, which inherit locks of threads). Raises DataError when one of them dies."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most often for lack of memory; finished files are kept, "
            "so run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """A worker waiting for work would outlive a parent that was killed."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # The main thread of the worker blocks on the queue of tasks and would not end otherwise.
        os._exit(1)


def ordered_map(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`map` with at most `ahead` items under way, so that memory does not depend on how many there are."""
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        # The oldest first, whichever is done: outputs are written in the order of the inputs.
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
