"""The processes of the ranks on this node, started through torch elastic."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

from mt_core.launch.logs import log_path

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
