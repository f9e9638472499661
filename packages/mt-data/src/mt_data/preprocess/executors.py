"""Who does the shards: this process, processes beside it, or (in `dask_executor`) a cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Protocol, cast

from mt_core.errors import DataError, MtError
from mt_data.preprocess.encoder import DocumentEncoder
from mt_data.preprocess.partial import writing_shards
from mt_data.preprocess.parts import Shard
from mt_data.preprocess.shards import ShardResult, Task, run_shard

END_SECONDS = 5.0


class Executor(Protocol):
    """Does shards in any order. The first error ends all of it, and no process of it is left behind."""

    feeds_streams: bool
    """Whether shards may carry the lines of a file that this process reads."""
    width: int
    """Shards done at once."""

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]: ...


class InlineExecutor:
    """One after the other, in this process."""

    feeds_streams = True
    width = 1

    def __init__(self, encoder: DocumentEncoder) -> None:
        self.encoder = encoder

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]:
        for shard in shards:
            yield run_shard(task, shard, self.encoder)


class ProcessExecutor:
    """In processes of this machine. Each builds the tokenizer once; results go through files, not pipes."""

    feeds_streams = True

    def __init__(self, workers: int) -> None:
        self.width = workers

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]:
        workers: list[_Worker] = []
        try:
            idle: list[_Worker] = []
            for shard in shards:
                while not idle and len(workers) == self.width:
                    yield from _finished(workers, idle)
                if not idle:
                    workers.append(_Worker(task))
                    idle.append(workers[-1])
                idle.pop().give(shard)
            while len(idle) < len(workers):
                yield from _finished(workers, idle)
            for worker in workers:
                worker.dismiss()
        finally:
            for worker in workers:
                worker.end()


def _finished(workers: list[_Worker], idle: list[_Worker]) -> Iterator[ShardResult]:
    """Wait until at least one worker that is busy is done; those that are become idle."""
    busy = [worker for worker in workers if worker.shard is not None]
    ready = wait([worker.connection for worker in busy])
    for worker in busy:
        if worker.connection in ready:
            yield worker.take()
            idle.append(worker)


class _Worker:
    """A process that does one shard at a time, as seen from outside."""

    def __init__(self, task: Task) -> None:
        # spawn: a forked child would inherit the locks of this process's threads.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.shard: Shard | None = None
        self._process = context.Process(target=_work, args=(task, theirs), daemon=True, name="mt-preprocess")
        with _sigint_blocked():
            self._process.start()
        theirs.close()

    def give(self, shard: Shard) -> None:
        self.shard = shard
        try:
            self.connection.send(shard)
        except OSError:
            raise self._death() from None

    def take(self) -> ShardResult:
        """The result of the shard it was given. Raises what ended it there, and DataError if it is gone."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, BaseException):
            raise answer
        self.shard = None
        return cast(ShardResult, answer)

    def dismiss(self) -> None:
        try:
            self.connection.send(None)
        except OSError:
            return
        self._process.join(END_SECONDS)

    def end(self) -> None:
        """End the process whatever it does, and wait until it is gone."""
        self._process.terminate()
        self.connection.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _death(self) -> DataError:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        memory = "; the system ends processes so when memory runs out: try fewer --workers" if code == -9 else ""
        files = ", ".join(dict.fromkeys(part.path for part in self.shard.parts)) if self.shard else "nothing"
        return DataError(f"a worker process {how} while it worked on {files}{memory}")


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """A process started meanwhile never sees Ctrl-C, which reaches all of a terminal; this one sees it afterwards."""
    # Python starts this helper with the first process, and unblocks SIGINT when it has.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(task: Task, connection: Connection) -> None:
    """What a worker process runs."""
    _end_with_parent()
    # EOFError, OSError: the other end is gone, and there is nobody to tell.
    with writing_shards(Path(task.folder)), suppress(EOFError, OSError):
        while (shard := connection.recv()) is not None:
            connection.send(_answer(task, shard))


def _answer(task: Task, shard: Shard) -> ShardResult | Exception:
    try:
        return run_shard(task, shard)
    except MtError as error:
        return error
    except Exception:
        # Other exceptions are defects, and not all of them can be sent.
        return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")


def _end_with_parent() -> None:
    """Let this process end when its parent does, be it by SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True, name="watch-parent").start()
