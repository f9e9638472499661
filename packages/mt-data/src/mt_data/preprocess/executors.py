"""Who does the shards: this process, processes beside it, or (in `dask_executor`) a cluster."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, cast

from mt_core.errors import DataError, MtError
from mt_core.launch.signals import signal_name
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

    def prepared(self, task: Task) -> AbstractContextManager[None]:
        """Surrounds a run. Entered before the run starts threads or takes locks, so that it can fork processes."""
        ...

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]: ...


class InlineExecutor:
    """One after the other, in this process."""

    feeds_streams = True
    width = 1

    def __init__(self, encoder: DocumentEncoder) -> None:
        self.encoder = encoder

    def prepared(self, task: Task) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]:
        for shard in shards:
            yield run_shard(task, shard, self.encoder)


# In place of a pool of multiprocessing or concurrent.futures: Pool waits forever for the task of a killed worker, and
# both take all of their input at once. Here each worker has a pipe of its own and gets its next shard when it is idle,
# so that at most `width` shards and one more are in memory.
class ProcessExecutor:
    """In processes of this machine; results go through files, not pipes.

    With an encoder the processes are forks of this one, made in `prepared`: they import nothing and build no
    tokenizer. Without, or where this process cannot be forked safely, each is started anew and builds its own.
    """

    feeds_streams = True

    def __init__(self, workers: int, encoder: DocumentEncoder | None = None) -> None:
        self.width = workers
        self.encoder = encoder
        self._forks: list[_Worker] = []

    @contextmanager
    def prepared(self, task: Task) -> Iterator[None]:
        try:
            if self.encoder is not None and can_fork():
                # A garbage collection in a fork would write to, and so copy, the pages of all objects made before.
                gc.freeze()
                try:
                    for _ in range(self.width):
                        self._forks.append(_fork(task, self.encoder))
                finally:
                    gc.unfreeze()
            yield
        finally:
            end_all(self._forks)
            self._forks = []

    def run(self, task: Task, shards: Iterator[Shard]) -> Iterator[ShardResult]:
        # From here on this method ends them, not `prepared`.
        workers, self._forks = self._forks, []
        idle = workers.copy()
        try:
            for shard in shards:
                # One shard is held while all workers are busy and no further one is taken, which limits what streams
                # read ahead.
                while not idle and len(workers) == self.width:
                    yield from _finished(workers, idle)
                if not idle:
                    # Spawned one by one as shards come, so that a corpus of two shards starts two processes.
                    workers.append(_spawn(task))
                    idle.append(workers[-1])
                idle.pop().give(shard)
            while len(idle) < len(workers):
                yield from _finished(workers, idle)
            # None ends the loop of `_work`; `end_all` below ends what does not end by itself.
            for worker in workers:
                worker.dismiss()
        finally:
            end_all(workers)


def can_fork() -> bool:
    """Whether a fork of this process can work: no other Python thread holds a lock that would stay locked in it.

    Linux only: the libraries of macOS do not survive a fork.
    """
    # active_count sees Python threads only; threads of OpenBLAS and of tokenizers (Rayon) are the libraries' own
    # matter.
    return sys.platform == "linux" and threading.active_count() == 1


def _finished(workers: list[_Worker], idle: list[_Worker]) -> Iterator[ShardResult]:
    """Wait until at least one worker that is busy is done; those that are become idle."""
    busy = [worker for worker in workers if worker.shard is not None]
    # A pipe becomes ready for its result and for the end of the process (EOF) alike, so a killed worker wakes this too.
    ready = wait([worker.connection for worker in busy])
    for worker in busy:
        if worker.connection in ready:
            yield worker.take()
            idle.append(worker)


class _Worker:
    """A process that does one shard at a time, as seen from outside."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.connection = connection
        self.shard: Shard | None = None
        self._process = process

    def give(self, shard: Shard) -> None:
        self.shard = shard
        try:
            # The worker waits in recv, so this takes as long as a copy of the shard (with the lines of a stream: some
            # MB).
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
        # SIGTERM ends a worker at once, by its default action; the shard under way has no .done.json yet and is done
        # again.
        self._process.terminate()
        self.connection.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        # Frees the sentinel's descriptor; Process objects otherwise keep it until they are collected.
        self._process.close()

    def _death(self) -> DataError:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        how = f"was ended by {signal_name(-code)}" if code is not None and code < 0 else f"ended with {code}"
        memory = "; the system ends processes so when memory runs out: try fewer --workers" if code == -9 else ""
        files = ", ".join(dict.fromkeys(part.path for part in self.shard.parts)) if self.shard else "nothing"
        return DataError(f"a worker process {how} while it worked on {files}{memory}")


def end_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.end()


def _spawn(task: Task) -> _Worker:
    """A worker in a fresh process: it imports what it needs and builds the tokenizer."""
    # Python starts this helper with the first process, and unblocks SIGINT when it has.
    resource_tracker.ensure_running()
    return _start("spawn", task, None, [signal.SIGINT])


def _fork(task: Task, encoder: DocumentEncoder) -> _Worker:
    """A worker that is a copy of this process, encoder included."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn of OpenBLAS's threads too, which handle a fork themselves (pthread_atfork).
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        # This process's handler of SIGTERM must not run in the copy, which puts the default back first.
        return _start("fork", task, encoder, [signal.SIGINT, signal.SIGTERM])


def _start(method: str, task: Task, encoder: DocumentEncoder | None, blocked: list[signal.Signals]) -> _Worker:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(task, theirs, encoder), daemon=True, name="mt-preprocess")
    with _blocked(blocked):
        process.start()
    # Else this process would hold both ends, and the end of the worker would never read as EOF. A fork of a later
    # worker inherits `ours` of the earlier ones, which is harmless: only the end of `theirs` is waited for.
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _blocked(signals: list[signal.Signals]) -> Iterator[None]:
    """A process started meanwhile never sees Ctrl-C, which reaches all of a terminal; this one sees it afterwards."""
    # A blocked signal stays pending and the mask is inherited by fork and exec; ignoring it instead would lose a Ctrl-C
    # of this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(task: Task, connection: Connection, encoder: DocumentEncoder | None) -> None:
    """What a worker process runs. It waits for its first shard before it touches the run's folder."""
    # The order matters: the handler is replaced while SIGTERM is still blocked. SIGINT stays blocked for good.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _end_with_parent()
    # EOFError, OSError: the other end is gone, and there is nobody to tell.
    with suppress(EOFError, OSError):
        shard = connection.recv()
        # Entered after the first shard: forks start before the parent has made and locked the folder, and this takes a
        # shared lock on a file in it.
        with writing_shards(Path(task.folder)):
            while shard is not None:
                connection.send(_answer(task, shard, encoder))
                shard = connection.recv()


def _answer(task: Task, shard: Shard, encoder: DocumentEncoder | None) -> ShardResult | Exception:
    try:
        return run_shard(task, shard, encoder)
    # Raised again by the parent as it is; its class and message are what the user sees.
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

    # The sentinel is the read end of a pipe whose write end the parent holds; the kernel closes it however the
    # parent ends. A forked worker also inherits the write ends of the workers before it, so they end one after another,
    # the last first. EOF on `connection` does not serve: a fork holds the parent's end of its own pipe too.
    def watch() -> None:
        wait([parent.sentinel])
        # Not sys.exit, which would end this thread alone, while the main thread may be in the middle of a shard.
        os._exit(1)

    Thread(target=watch, daemon=True, name="watch-parent").start()
