"""The monitor thread of a rank: publishes its position, detects failures of other ranks, and finds late ranks.

The training loop only sets `Phases.position`, which this thread reads once a second.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from mt_core.errors import TrainingError
from mt_core.launch.environment import RankEnvironment
from mt_core.launch.failure import Failure, describe_failure, followed_by, ranks
from mt_core.launch.phases import Phases, Position
from mt_core.launch.recorder import FAILED, STORE_SECONDS, FailureRecorder

INTERVAL = 1.0
RANKS_PER_SECOND = 2000
"""Reports per second over all ranks that the store receives; with more ranks each reports less often."""
OWN_ERROR_SECONDS = 1.0
"""How long a rank that learns of a failure waits for its main thread to raise an error itself."""
LATE = "late"
SHOWN = 8


def position_key(rank: int) -> str:
    return f"position/{rank}"


class Monitor:
    """Monitors this rank from a background thread, and ends the process when the run has failed."""

    def __init__(
        self, environment: RankEnvironment, store: dist.Store, phases: Phases, recorder: FailureRecorder
    ) -> None:
        self.environment = environment
        self.phases = phases
        self.recorder = recorder
        # All ranks report to one TCP server. 16,384 ranks report every 8 seconds.
        self.interval = max(INTERVAL, environment.world_size / RANKS_PER_SECOND)
        self._store = store.clone()  # a waiting call of the main thread must not block this one
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._published: Position | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mt-monitor", daemon=True)
        # The constructor runs in the main thread.
        self._main = threading.get_ident()

    def start(self) -> None:
        """Call from the main thread: its stack is shown when this rank is late."""
        self._publish()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STORE_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(self.interval):
            try:
                self._publish()
                self._follow_a_failure()
                self._check_limit()
            # The server of the store ends with the run: after stop() that is no failure.
            except dist.DistError as error:
                if not self._stopped.is_set():
                    self._store_is_gone(error)

    def _publish(self) -> None:
        position = self.phases.position
        # Nothing is sent while the rank stays in one phase and step.
        if position != self._published:
            self._store.set(position_key(self.environment.rank), position.to_json())
            self._published = position

    # -- failures of others ---------------------------------------------------------------------

    def _follow_a_failure(self) -> None:
        if self._store.check([FAILED]):
            self._follow(Failure.from_json(self._store.get(FAILED)))

    def _follow(self, cause: Failure) -> None:
        """End because of another rank's failure, unless the main thread fails with an error itself first."""
        # stop() is called when the main thread succeeds. If it fails, the recorder ends the process during this wait.
        if self._stopped.wait(OWN_ERROR_SECONDS):
            return
        failure = self._describe(TrainingError(f"followed {cause.where}: {cause.exception}"))
        self.recorder.leave(followed_by(failure, cause))

    def _store_is_gone(self, error: Exception) -> None:
        if self._stopped.wait(OWN_ERROR_SECONDS):
            return
        server = "the launcher of the first node" if self.environment.launcher_has_store else "rank 0"
        address = f"{self.environment.master_addr}:{self.environment.master_port}"
        failure = self._describe(TrainingError(f"{server}, which keeps the store at {address}, is gone: {error}"))
        # The rank or launcher that served the store has failed first, and has the cause.
        self.recorder.leave(dataclasses.replace(failure, followed=True))

    # -- time limits ----------------------------------------------------------------------------

    def _check_limit(self) -> None:
        position = self.phases.position
        if position.timeout is None or position.seconds <= position.timeout:
            return
        # All waiting ranks reach the limit at about the same time: one of them reads the positions for all.
        # The second condition: the rank that took the task may itself have ended before it reported.
        if self._store.add(LATE, 1) == 1 or position.seconds > position.timeout + 2 * STORE_SECONDS:
            late, message = late_ranks(self.environment.rank, position, self._positions())
            failure = self._describe(TrainingError(message))
            self.recorder.leave(dataclasses.replace(failure, late=late))

    def _positions(self) -> dict[int, Position]:
        """The last published position of each other rank."""
        # One request a rank. Only the first rank past its limit sends them, and the run ends afterwards.
        others = [rank for rank in range(self.environment.world_size) if rank != self.environment.rank]
        reported = [rank for rank in others if self._store.check([position_key(rank)])]
        return {rank: Position.from_json(self._store.get(position_key(rank))) for rank in reported}

    def _describe(self, error: TrainingError) -> Failure:
        """A record whose traceback is the main thread's stack, which ends in the blocking call."""
        failure = describe_failure(error, self.environment, self.phases.position)
        return dataclasses.replace(failure, traceback=self._main_stack(), time=time.time())

    def _main_stack(self) -> str:
        # The main thread hangs in a collective and cannot report by itself.
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


def late_ranks(own_rank: int, own_position: Position, others: dict[int, Position]) -> tuple[tuple[int, ...], str]:
    """The ranks that have entered fewest phases, and a message that names them.

    All ranks enter the same phases in the same order, so the lowest count identifies the ranks that are behind. When
    all counts are equal, the ranks wait for one another inside the same phase, and no rank is named.
    """
    message = (
        f"phase {own_position.phase} has lasted {own_position.seconds:.0f} s on rank {own_rank}, more than its "
        f"{own_position.timeout:g} s"
    )
    fewest = min([own_position.entered, *(position.entered for position in others.values())])
    everyone = {own_rank: own_position, **others}
    late = tuple(sorted(rank for rank, position in everyone.items() if position.entered == fewest))
    if len(late) == len(everyone):
        where = f"in {own_position}" if own_position.step is not None else "in it"
        return (), f"{message}. No rank is behind: all are {where}; errors/ has the place at which each one waits"
    places = "; ".join(f"rank {rank} ({everyone[rank]}, for {everyone[rank].seconds:.0f} s)" for rank in late[:SHOWN])
    more = f" and {len(late) - SHOWN} more" if len(late) > SHOWN else ""
    ahead = ranks([rank for rank in everyone if rank not in late]).lower()
    return late, f"{message}. Late: {places}{more}; {ahead} came further"
