"""Starts ranks on this node that run the same `mt` command, and supervises them until they end.

from mt_core.launch.local import launch

exit_code = launch(8, ["train", "my.toml"], run_dir="runs/mine")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mt_core.errors import ConfigError
from mt_core.launch import environment
from mt_core.launch.environment import AGENT_STORE, ATTEMPT, LAUNCHED_BY_MT
from mt_core.launch.failure import ERRORS, forget_failure
from mt_core.launch.process_group import run_store
from mt_core.launch.processes import LOGS, DelayedView, RankProcesses, keep_previous, log_path
from mt_core.launch.signals import ForwardedSignals
from mt_core.launch.supervisor import Supervisor

DEFAULT_ENTRY = (sys.executable, "-m", "mt_cli")
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Placement:
    """The ranks of this launcher among all ranks of the run."""

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    """Address of the first node; None for a single node: loopback."""
    master_port: int | None = None

    @property
    def address(self) -> str:
        return self.master_addr or LOOPBACK

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def ranks(self) -> range:
        return range(self.node_rank * self.nproc, (self.node_rank + 1) * self.nproc)


def launch(
    nproc: int,
    arguments: Sequence[str],
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    entry: Sequence[str] = DEFAULT_ENTRY,
    run_dir: str | Path | None = None,
) -> int:
    """Run `entry` with `arguments` as nproc ranks here, and return the exit code of the run.

    0 when every rank exited with 0, 75 when a signal ended them with a checkpoint (`signals.INTERRUPTED_STATUS`); else
    that of the first rank to fail (128 + n for signal n). Its error is shown first on standard error, and the remaining
    ranks are ended within seconds.
    Output of rank 0 is shown; that of the others is written to `logs/rank-N.log` in `run_dir`, records of failures
    to `errors/rank-N.json` (without a run_dir: in a temporary folder, which is kept after a failure). A configuration
    that ranks refuse before there is anything of a run leaves neither.
    With several nodes, the same call is made on each of them with its node_rank; master_addr is the first node.
    SIGTERM and SIGINT are passed to the ranks; a second one kills them.

    Raises ConfigError for invalid numbers, when this process is itself a rank, or when the port is in use.
    """
    placement = Placement(nproc, nnodes, node_rank, master_addr, master_port)
    check_placement(placement, os.environ)
    server = _serve_store(placement) if node_rank == 0 else None
    port = server.port if server is not None else master_port
    with _folder(run_dir, placement.ranks) as folder:
        variables = {rank: rank_variables(placement, rank, port, folder, os.environ) for rank in placement.ranks}
        return _run([*entry, *arguments], placement, variables, folder, server)


def check_placement(placement: Placement, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for invalid numbers, and for a launcher started inside a rank (by torchrun or srun)."""
    if placement.nproc < 1 or placement.nnodes < 1:
        raise ConfigError(f"--nproc {placement.nproc} and --nnodes {placement.nnodes} must be at least 1")
    if not 0 <= placement.node_rank < placement.nnodes:
        raise ConfigError(f"--node-rank {placement.node_rank} is not below --nnodes {placement.nnodes}")
    if placement.nnodes > 1 and (placement.master_port is None or placement.master_addr is None):
        raise ConfigError(
            f"--nnodes {placement.nnodes} needs --master-addr, the first node's name, and --master-port, a port "
            f"that is free on it; both the same on each node"
        )
    for name in ("RANK", "WORLD_SIZE"):
        if name in environ:
            raise ConfigError(f"{name}={environ[name]} is set: this process is a rank already; drop --nproc")
    tasks = environment.first_of(environ, environment.WORLD_SIZE)
    if environment.is_step(environ) and tasks and int(environ[tasks]) != placement.nnodes:
        raise ConfigError(
            f"{tasks}={environ[tasks]}: srun runs this command as so many tasks, each of which would start "
            f"{placement.nproc} ranks of --nnodes {placement.nnodes}; drop --nproc, and each task is a rank"
        )


def rank_variables(
    placement: Placement, rank: int, port: int | None, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment that torchrun would set for this rank, and the folder for logs and failure records."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(rank - placement.ranks.start),
        "LOCAL_WORLD_SIZE": str(placement.nproc),
        "MASTER_ADDR": placement.address,
        "MASTER_PORT": str(port),
        # torchrun sets 1 here, which leaves cores idle on a CPU.
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(threads_per_rank(placement.nproc)),
        AGENT_STORE: "True",
        ATTEMPT: "0",
        LAUNCHED_BY_MT: str(folder.absolute()),
    }


def threads_per_rank(nproc: int) -> int:
    """The cores this process may use, divided among the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


def _run(
    command: Sequence[str],
    placement: Placement,
    variables: Mapping[int, dict[str, str]],
    folder: Path,
    server: dist.TCPStore | None,
) -> int:
    # Assigned below, and read by the lambdas when a signal arrives: it may come before the start has returned.
    processes: RankProcesses | None = None
    signals = ForwardedSignals(
        lambda number: processes.send(number) if processes else None, lambda: processes.kill() if processes else None
    )
    view = DelayedView(log_path(folder, 0), sys.stderr.buffer) if placement.node_rank == 0 else None
    with signals:
        processes = RankProcesses.start(command, variables, folder)
        signals.install()
        supervisor = Supervisor(
            processes, placement.world_size, folder, signals, view, lambda: _store(placement, server)
        )
        try:
            code = supervisor.run(spans_nodes=placement.nnodes > 1)
        finally:
            processes.close()
        if supervisor.refused:
            _remove_traces(folder, placement.ranks)
        return code


def _remove_traces(folder: Path, ranks: range) -> None:
    """After a refusal, which was shown: a single process leaves no folder either. Other nodes remove their own."""
    for rank in ranks:
        forget_failure(folder, rank)
        log_path(folder, rank).unlink(missing_ok=True)
    for emptied in (folder / LOGS, folder / ERRORS, folder):
        # Not empty: of other nodes, or of an earlier start.
        with contextlib.suppress(OSError):
            emptied.rmdir()


def _serve_store(placement: Placement) -> dist.TCPStore:
    """The launcher of the first node serves the store: it outlives every rank, and a free port can be chosen."""
    try:
        return dist.TCPStore(placement.address, placement.master_port or 0, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        where = f"{placement.address}:{placement.master_port}"
        raise ConfigError(f"cannot listen on {where}: {error}; choose another --master-port") from error


def _store(placement: Placement, server: dist.TCPStore | None) -> dist.Store | None:
    """The run's store, to read the positions of ranks and to announce a failure; None when it is unreachable."""
    if server is not None:
        return run_store(server, 0)
    assert placement.master_port is not None
    try:
        client = dist.TCPStore(
            placement.address,
            placement.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )
    except dist.DistError:
        return None
    return run_store(client, 0)


@contextlib.contextmanager
def _folder(run_dir: str | Path | None, ranks: range) -> Iterator[Path]:
    """The folder for logs and records, cleared of earlier records. A temporary one is removed after success."""
    folder = Path(run_dir) if run_dir is not None else Path(tempfile.mkdtemp(prefix="mt-launch-"))
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {folder}: {error.strerror}; choose another with --run-dir") from error
    for rank in ranks:
        forget_failure(folder, rank)
        keep_previous(log_path(folder, rank))
    yield folder
    # Not in a finally: after an exception the logs stay.
    if run_dir is None and not (folder / ERRORS).exists():
        shutil.rmtree(folder, ignore_errors=True)
