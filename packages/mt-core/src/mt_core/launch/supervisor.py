"""Supervises launched ranks: detects the first failure, ends the other ranks, and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from mt_core.errors import ConfigError
from mt_core.launch.failure import ERRORS, Failure, in_order, lost_peer, read_failures, report, write_failure
from mt_core.launch.monitor import position_key
from mt_core.launch.phases import Position
from mt_core.launch.process_group import wait_until_left
from mt_core.launch.processes import LOGS, DelayedView, RankProcesses, log_path, tail
from mt_core.launch.recorder import LINGER_SECONDS, announce
from mt_core.launch.signals import INTERRUPTED_STATUS, PASSED_AS, ForwardedSignals, signal_name

POLL_SECONDS = 0.05
GRACE_SECONDS = 4.0
"""Grace period after the first failure before the remaining ranks are killed, to write their records."""
SIGNALS: Mapping[int, str] = {
    signal.SIGKILL: "killed: by hand, by the scheduler, or because the machine ran out of memory",
    signal.SIGSEGV: "ended by a fault in compiled code",
    signal.SIGABRT: "aborted by compiled code",
    signal.SIGBUS: "ended by a memory fault; shared memory may be full",
}


@dataclasses.dataclass(frozen=True)
class Death:
    """A rank with a nonzero exit code. time: seconds since the epoch. code: negative for a signal."""

    rank: int
    code: int
    time: float


class Supervisor:
    """One run of launched ranks."""

    def __init__(
        self,
        processes: RankProcesses,
        world_size: int,
        folder: Path,
        signals: ForwardedSignals,
        view: DelayedView | None,
        connect: Callable[[], dist.Store | None],
    ) -> None:
        self.processes = processes
        self.world_size = world_size
        self.folder = folder
        self.signals = signals
        self.view = view
        self.deaths: dict[int, Death] = {}
        self.interrupted = False
        """Whether a rank has ended with INTERRUPTED_STATUS, which is no failure."""
        self.refused = False
        """Whether the ranks refused the configuration before there was anything of a run."""
        self._connect = connect

    def run(self, *, spans_nodes: bool) -> int:
        """Wait for the ranks and return the exit code. spans_nodes: announce failures to the other nodes."""
        # 1. Wait for the end of all ranks, or for the first death.
        running = self._wait(lambda: bool(self.deaths))
        if not self.deaths:
            return self._succeed(spans_nodes)
        if spans_nodes:
            self._tell_other_nodes()
        # 2. Let the other ranks follow by themselves, so that they write their records. 3. Kill the rest, and report.
        end = time.monotonic() + GRACE_SECONDS
        running = self._wait(lambda: time.monotonic() > end) if running else running
        self.processes.close()
        # Before the report: ranks that obeyed a signal have not failed.
        if self._was_stopped():
            return 128 + self.signals.received[0]
        return self._report(running)

    def _wait(self, until: Callable[[], bool]) -> list[int]:
        """Poll the ranks until all have ended or `until` returns true; returns those still running."""
        while True:
            codes = self.processes.poll()
            for rank, code in codes.items():
                self.interrupted |= code == INTERRUPTED_STATUS
                if code and code != INTERRUPTED_STATUS and rank not in self.deaths:
                    self.deaths[rank] = Death(rank, code, time.time())
            running = [rank for rank, code in codes.items() if code is None]
            if not running or until():
                return running
            # After a death, rank 0 prints errors about its lost peer; the report shows the cause in their place.
            if self.view is not None and not self.deaths:
                self.view.pump()
            time.sleep(POLL_SECONDS)

    def _succeed(self, spans_nodes: bool) -> int:
        if self.view is not None:
            self.view.finish()
        # Only the launcher of the first node has the view, and serves the store.
        store = self._connect() if spans_nodes and self.view is not None else None
        if store is not None:  # ranks of other nodes may still need the store that this process serves
            wait_until_left(store, self.world_size)
        return INTERRUPTED_STATUS if self.interrupted else 0

    def _was_stopped(self) -> bool:
        """Whether the ranks ended because of a forwarded signal, and none failed for another reason."""
        if len(self.signals.received) != 1:
            # A second signal killed the ranks, whatever else happened.
            return bool(self.signals.received)
        records = read_failures(self.folder, self.deaths)
        return all(self._obeyed(death, records.get(death.rank)) for death in self.deaths.values())

    def _obeyed(self, death: Death, record: Failure | None) -> bool:
        """Whether a rank ended by the forwarded signal, or followed one that did."""
        if record is not None:
            return record.followed or record.exception == KeyboardInterrupt.__name__
        return death.code == -PASSED_AS[self.signals.received[0]]

    # -- failures -------------------------------------------------------------------------------

    def failures(self) -> list[Failure]:
        """For each failed rank its record, or one from its exit code and log."""
        records = read_failures(self.folder, self.deaths)
        silent = [rank for rank in self.deaths if rank not in records]
        store = self._connect() if silent else None
        return [*records.values(), *(self._silent_failure(self.deaths[rank], store) for rank in silent)]

    def _silent_failure(self, death: Death, store: dist.Store | None) -> Failure:
        """The failure of a rank without a record."""
        position = _last_position(store, death.rank)
        end_of_log = tail(log_path(self.folder, death.rank))
        shown = f"\n\nThe end of its log:\n\n{end_of_log}" if end_of_log else ""
        failure = Failure(
            rank=death.rank,
            host=socket.gethostname(),
            phase=position.phase,
            step=position.step,
            exception=f"exit code {death.code}" if death.code > 0 else signal_name(-death.code),
            message=_explain(death) + shown,
            traceback="",
            time=death.time,
            # 128 + number of the signal.
            exit_code=death.code if death.code > 0 else 128 - death.code,
            followed=death.code > 0 and lost_peer(end_of_log),
        )
        write_failure(failure, self.folder)
        return failure

    def _tell_other_nodes(self) -> None:
        """Announce the failure so that the ranks of other nodes end. A rank with a record has announced it itself."""
        store = self._connect()
        with contextlib.suppress(dist.DistError):
            if store is not None:
                announce(store, in_order(self.failures())[0])
        if self.view is not None:  # the store ends with this process
            time.sleep(LINGER_SECONDS)

    def _report(self, ended: list[int]) -> int:
        failures = self.failures()
        first = in_order(failures)[0]
        dead = set(self.deaths)
        text = report(failures, [rank for rank in ended if rank not in dead])
        self.refused = first.exit_code == ConfigError.exit_code and _has_no_run(self.folder)
        if not self.refused:
            text += f"Logs of the ranks: {self.folder / LOGS}; records of failures: {self.folder / ERRORS}\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        return first.exit_code or 1


def _has_no_run(folder: Path) -> bool:
    """Whether ranks have left no more than their logs and records: nothing has begun."""
    return {path.name for path in folder.iterdir()} <= {LOGS, ERRORS}


def _last_position(store: dist.Store | None, rank: int) -> Position:
    """The last published position of a rank, at most a second before its end."""
    with contextlib.suppress(dist.DistError):
        if store is not None and store.check([position_key(rank)]):
            return Position.from_json(store.get(position_key(rank)))
    return Position()


def _explain(death: Death) -> str:
    if death.code > 0:
        return f"ended with exit code {death.code} and no record of why"
    return SIGNALS.get(-death.code, "ended by this signal")
