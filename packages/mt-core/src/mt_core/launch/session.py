"""The context manager around a rank's program: its environment, process group, phases, and failure handling.

from mt_core.launch.session import rank_session

with rank_session("cpu", run_dir="runs/mine") as session:
    with session.phases("load"):
        ...
    for step in range(1, steps + 1):
        session.phases.enter("step", step=step)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mt_core.launch.environment import LAUNCHED_BY_MT, RankEnvironment, read_environment
from mt_core.launch.failure import forget_failure
from mt_core.launch.monitor import Monitor
from mt_core.launch.phases import Phases, PhaseTimeouts
from mt_core.launch.process_group import initialize, shutdown
from mt_core.launch.recorder import FailureRecorder


@dataclass(frozen=True)
class RankSession:
    """The environment, device and phases of this rank."""

    environment: RankEnvironment
    phases: Phases


@contextmanager
def rank_session(
    device_type: str,
    *,
    run_dir: str | Path | None = None,
    timeouts: PhaseTimeouts | None = None,
    environment: RankEnvironment | None = None,
) -> Iterator[RankSession]:
    """Context manager of a rank's program, with a process group when there are several ranks.

    With several ranks an exception ends the process immediately: it is written to `errors/rank-N.json`, announced to
    the other ranks, and the process exits with the error's exit code and without cleanup, which could hang. In a
    single process, and in a world that the caller has initialized, exceptions propagate.
    """
    phases = Phases(timeouts)
    # A notebook, a test or another framework made the world, and handles its failures.
    if dist.is_initialized():
        yield RankSession(environment or _environment_of_world(), phases)
        return
    environment = environment or read_environment()
    if environment.world_size == 1 and environment.launcher != "mt":
        initialize(environment, device_type, phases.timeouts)
        yield RankSession(environment, phases)
        return
    os.environ.update(environment.variables())  # the world that configurations are checked against: srun sets others
    folder = failure_folder(run_dir, os.environ)
    forget_failure(folder, environment.rank)
    recorder = FailureRecorder(environment, folder, phases)
    try:
        with _connected(environment, device_type, phases, recorder):
            yield RankSession(environment, phases)
    except BaseException as error:
        # sys.exit(0) of the program is a success.
        if isinstance(error, SystemExit) and not error.code:
            raise
        recorder.fail(error)


@contextmanager
def _connected(
    environment: RankEnvironment, device_type: str, phases: Phases, recorder: FailureRecorder
) -> Iterator[None]:
    """The process group and the monitor, closed on success only."""
    # The limit of this phase is enforced by initialize() itself: the monitor needs the store that it connects.
    with phases("init"):
        store = initialize(environment, device_type, phases.timeouts)
    if store is None:
        yield
        return
    recorder.use_store(store)
    monitor = Monitor(environment, store, phases, recorder)
    monitor.start()
    yield
    # Not in a finally: after an error the monitor keeps publishing until the recorder ends the process.
    monitor.stop()
    shutdown(environment, store)


def failure_folder(run_dir: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    """The folder for failure records: the launcher's, else the run directory."""
    if environ.get(LAUNCHED_BY_MT):
        return Path(environ[LAUNCHED_BY_MT])
    return None if run_dir is None else Path(run_dir)


def _environment_of_world() -> RankEnvironment:
    rank, size = dist.get_rank(), dist.get_world_size()
    return RankEnvironment(rank=rank, world_size=size, local_rank=rank, local_world_size=size, launcher="variables")
