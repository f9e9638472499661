"""Processes that write parts of a conversion's files at the same time.

Each opens the source and plans the files as the first process did; then it receives one part after another
and reports what it wrote. Only the first process creates, finishes and records files; it writes parts too until the
others have started, which takes them seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import torch

from mt_ckpt.convert.prepare import Request, prepare
from mt_ckpt.convert.source import Source
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, FilePart, FilePlan
from mt_core.errors import CheckpointError
from mt_core.plugins import load_plugins

READ, WRITTEN, FAILED = "read", "written", "failed"
"""What a worker reports: a tensor that it read, a part that it wrote, the error by which it ended."""
NoteRead = Callable[[str, int], None]


class Workers:
    """`count` processes for the conversion `request` by the saver named `saver`."""

    def __init__(self, count: int, request: Request, saver: str) -> None:
        self.count, self._request, self._saver = count, request, saver

    def write(
        self, folder: Path, parts: Sequence[FilePart], plan: FilePlan, note_read: NoteRead
    ) -> Iterator[tuple[FilePart, Any]]:
        """Have `parts` of the files in `folder` written; gives each with what the writer returned, as they are done.

        plan: writes those parts that this process writes. note_read: called with each tensor that another one reads,
        and its bytes. Raises what a worker raises, and CheckpointError for one that ended without a report. All
        processes are ended.
        """
        context = multiprocessing.get_context("spawn")  # a fork would take locks of torch's threads along
        team = [_Worker(context, self, folder) for _ in range(min(self.count, len(parts)))]
        try:
            left = deque(parts)
            # Handed out at once: the pipe holds the part until the worker has started and reads it.
            for worker in team:
                worker.hand(left.popleft())
            yield from _write_meanwhile(team, left, plan, folder)
            yield from _distribute(team, left, note_read)
        finally:
            for worker in team:
                worker.close()

    def serve(self, connection: Connection, folder: Path) -> None:
        """The worker's loop: write each part that it receives, until there are no more."""
        host = load_plugins()
        # Every process opens the checkpoint itself: open files and mappings cannot be pickled.
        source = prepare(self._request, host).source
        _report_reading(source, connection)
        spec = host[CHECKPOINT_SAVERS].get(self._saver)
        assert spec.plan is not None
        plan = spec.plan.load()(source, self._request.options, host)
        while (part := connection.recv()) is not None:
            connection.send((WRITTEN, plan.write(folder, part)))


class _Worker:
    """A process, and what it is working on."""

    def __init__(self, context: SpawnContext, workers: Workers, folder: Path) -> None:
        self.connection, there = context.Pipe()
        # Cores are shared: torch would use all of them in each process.
        threads = max(1, (os.cpu_count() or 1) // workers.count)
        self.process: SpawnProcess = context.Process(target=_main, args=(there, workers, folder, threads), daemon=True)
        self.process.start()
        # Else this process would hold the other end open, and recv would not end when the worker dies.
        there.close()
        self.part: FilePart | None = None

    def hand(self, part: FilePart | None) -> None:
        """None: there are no more."""
        self.part = part
        try:
            self.connection.send(part)
        except OSError:  # it has ended; the next report is that
            return

    def report(self) -> tuple[str, Any]:
        """Raises CheckpointError when the process has ended without one."""
        try:
            report: tuple[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            place = f" while it wrote {self.part.file}" if self.part else ""
            raise CheckpointError(
                f"a process of --nproc ended with {_ending(self.process.exitcode)}{place}; if memory was short, use "
                "fewer; the same command resumes with the files that are finished"
            ) from None
        return report

    def close(self) -> None:
        if self.process.is_alive():
            self.process.terminate()
        self.process.join()
        self.connection.close()


def _write_meanwhile(
    team: Sequence[_Worker], left: deque[FilePart], plan: FilePlan, folder: Path
) -> Iterator[tuple[FilePart, Any]]:
    """Parts that are written here until the first worker reports something."""
    # timeout=0 only looks. The first report shows that the workers have started.
    while left and not wait([worker.connection for worker in team], timeout=0):
        part = left.popleft()
        yield part, plan.write(folder, part)


def _distribute(team: Sequence[_Worker], left: deque[FilePart], note_read: NoteRead) -> Iterator[tuple[FilePart, Any]]:
    at_work = {worker.connection: worker for worker in team}
    while at_work:
        for connection in wait(list(at_work)):
            worker = at_work[connection]  # type: ignore[index]
            kind, content = worker.report()
            # A worker reports several tensors for one part; only WRITTEN makes it free.
            if kind == READ:
                note_read(*content)
            elif kind == FAILED:
                raise content
            else:
                done, following = worker.part, left.popleft() if left else None
                worker.hand(following)
                if following is None:
                    del at_work[worker.connection]
                assert done is not None
                # After the worker has its next part: it works while this process syncs and records.
                yield done, content


# -- in a worker ------------------------------------------------------------------------------------


def _main(connection: Connection, workers: Workers, folder: Path, threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        workers.serve(connection, folder)
    # Also SystemExit and KeyboardInterrupt: a worker that ends without a report looks like a kill.
    except BaseException as error:
        connection.send((FAILED, _sendable(error)))


def _end_with_parent() -> None:
    """Ends the worker when the first process has ended: another process may already write the files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The sentinel becomes ready when the parent ends, however that happens (also by SIGKILL).
    wait([parent.sentinel])
    # Without cleaning up: sys.exit would end this thread alone.
    os._exit(1)


def _report_reading(source: Source, connection: Connection) -> None:
    source.on_read = lambda name, num_bytes: connection.send((READ, (name, num_bytes)))


def _sendable(error: BaseException) -> BaseException:
    """The error, or one with its traceback where it cannot be sent as it is."""
    text = "".join(traceback.format_exception(error))
    try:
        # Tried in both directions: an exception with arguments of its own can often be pickled, but not restored.
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"a process of --nproc failed:\n{text}")
    copy.add_note(f"in a process of --nproc:\n{text}")
    return copy


def _ending(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
