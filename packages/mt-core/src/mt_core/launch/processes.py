"""The processes of the ranks on this node, started through torch elastic, and their logs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

# -- logs, and the live view of one of them ---------------------------------------------------------------

LOGS = "logs"
TAIL_LINES, TAIL_BYTES = 30, 16384


def log_path(folder: Path, rank: int) -> Path:
    return folder / LOGS / f"rank-{rank}.log"


def keep_previous(log: Path) -> None:
    """Rename the log of the previous start to rank-N.previous.log."""
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_suffix(".previous.log"))


def tail(path: Path) -> str:
    """The last lines of a log; nothing when there is none."""
    try:
        with path.open("rb") as file:
            # A log may be gigabytes long.
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


class DelayedView:
    """Shows the output written to a log, delayed by half a second.

    When another rank fails, rank 0 prints errors about its lost peer. The delay gives the launcher time to learn of
    the failure and to show its cause first; the lines of rank 0 remain in the log only.
    """

    def __init__(self, path: Path, output: BinaryIO, delay: float = 0.5) -> None:
        self.path = path
        self.output = output
        self.delay = delay
        self._offset = 0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def pump(self) -> None:
        """Read new output, and show the output that is old enough."""
        self._take()
        while self._waiting and self._waiting[0][0] + self.delay <= time.monotonic():
            self._write(self._waiting.popleft()[1])

    def finish(self) -> None:
        """Show all remaining output."""
        self._take()
        while self._waiting:
            self._write(self._waiting.popleft()[1])

    def _take(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        if new:
            self._offset += len(new)
            # The time of reading stands for that of writing; it is polled every 0.05 s.
            self._waiting.append((time.monotonic(), new))

    def _write(self, data: bytes) -> None:
        self.output.write(data)
        self.output.flush()


REAP_SECONDS = 5.0


class NoRedirection(LogsSpecs):
    """`rank_entry` redirects both streams of a rank to one log, in the order written, which elastic does not."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # An empty path: no redirection.
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""


class RankProcesses:
    """Processes by global rank. Each leads a POSIX process group, which includes its data workers."""

    def __init__(self, context: SubprocessContext, first_rank: int) -> None:
        self._context = context
        self.first_rank = first_rank

    @classmethod
    def start(cls, command: Sequence[str], variables: Mapping[int, dict[str, str]], folder: Path) -> RankProcesses:
        """Start `command` once for each rank. variables: environment by global rank."""
        first_rank = min(variables)
        context = start_processes(
            name="mt",
            entrypoint=sys.executable,
            # elastic numbers the processes of a node from 0.
            args={rank - first_rank: _arguments(rank, command, folder) for rank in variables},
            envs={rank - first_rank: dict(values) for rank, values in variables.items()},
            logs_specs=NoRedirection(),
        )
        assert isinstance(context, SubprocessContext)
        return cls(context, first_rank)

    def poll(self) -> dict[int, int | None]:
        """Exit code by rank, negative for a signal; None while it runs."""
        return {rank: process.poll() for rank, process in self._processes().items()}

    def send(self, number: signal.Signals) -> None:
        """Send to each running rank, not to its data workers, which the rank ends itself."""
        for process in self._processes().values():
            # poll() has not seen it end. The id of a process that has been waited for may be another process's.
            if process.returncode is None:
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, with all child processes."""
        for process in self._processes().values():
            with contextlib.suppress(ProcessLookupError):
                # The leader may have ended and left children in its group.
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill running processes and wait for them, with a time limit: a process may hang in a device driver."""
        self.kill()
        end = time.monotonic() + REAP_SECONDS
        for process in self._processes().values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._context.close(signal.SIGKILL, timeout=1)

    def _processes(self) -> dict[int, subprocess.Popen[bytes]]:
        handlers = self._context.subprocess_handlers
        return {self.first_rank + local_rank: handler.proc for local_rank, handler in handlers.items()}


def _arguments(rank: int, command: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Rank 0 keeps the launcher's standard output."""
    streams = "2" if rank == 0 else "1,2"
    log = str(log_path(folder, rank))
    return ("-m", "mt_core.launch.rank_entry", str(os.getpid()), log, streams, *command)
