"""Shards on a Dask cluster (the extra mt-data[dask]): for corpora past one machine.

Its workers must see the inputs, the tokenizer's files and the output's folder under the same absolute paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mt_core.errors import ConfigError, DataError
from mt_data.preprocess.partial import writing_shards
from mt_data.preprocess.parts import Shard
from mt_data.preprocess.shards import ShardResult, Task, run_shard

if TYPE_CHECKING:
    from distributed import Client, Future

SHARDS_PER_THREAD = 2
"""Handed out at once, so that no thread of a worker waits for its next."""
CONNECT_SECONDS = 30


class DaskExecutor:
    """The shard function of the other executors, run by `distributed`. Compressed files are done whole."""

    feeds_streams = False
    width = 1

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler

    def prepared(self, task: Task) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]:
        with _connected(self.scheduler) as client:
            threads = sum(client.nthreads().values())
            if not threads:
                raise DataError(f"--dask-scheduler {self.scheduler} has no worker; start some (dask worker)")
            pending: set[Future] = set()
            try:
                for shard in shards:
                    # pure=False: a shard writes files, so Dask must neither take an equal call's result nor share the
                    # call.
                    pending.add(client.submit(_run_shard, task, shard, pure=False))
                    if len(pending) >= threads * SHARDS_PER_THREAD:
                        yield from _finished(client, pending)
                while pending:
                    yield from _finished(client, pending)
            finally:
                # On an error or Ctrl-C too; tasks that have begun cannot be cancelled and end by themselves (see
                # _run_shard).
                client.cancel(list(pending), force=True)


def _run_shard(task: Task, shard: Shard) -> ShardResult:
    """On a worker; it may outlive the run that requested it, and then keeps the next run waiting."""
    with writing_shards(Path(task.folder)):
        return run_shard(task, shard)


def _finished(client: Client, pending: set[Future]) -> Iterator[ShardResult]:
    """Wait for at least one; raises what a shard raised. Takes them out of `pending`."""
    from distributed import KilledWorker, wait

    # wait() uses the current client, and this one is not the process's default.
    with client.as_current():
        done = wait(pending, return_when="FIRST_COMPLETED").done
    for future in done:
        pending.discard(future)
        try:
            yield future.result()
        except KilledWorker as error:
            raise DataError(f"Dask workers died, one after the other, over one shard: {error}") from error


@contextmanager
def _connected(scheduler: str) -> Iterator[Client]:
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ConfigError("--executor dask needs Dask (pip install distributed, or mt-data[dask])") from error
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise DataError(f"--dask-scheduler {scheduler} cannot be reached: {error}") from error
    with client:
        yield client
