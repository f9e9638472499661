"""Ranks that srun or the like started: no launcher of ours collects anything, so they end and speak by themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.dist.launching import store_at_any_port, wait_until, wait_until_published

from mt_core.errors import ConfigError, DataError, TrainingError
from mt_core.launch import process_group
from mt_core.launch.environment import RankEnvironment
from mt_core.launch.monitor import late_ranks
from mt_core.launch.phases import Phases, PhaseTimeouts, Position
from mt_core.launch.process_group import initialize, select_device
from mt_core.launch.session import RankSession, rank_session
from mt_core.testing import rank_context, run_ranks

pytestmark = pytest.mark.dist
SECONDS_TO_END = 120


def rank_main(rank: int, world_size: int, folder: Path, function: Callable[[int, Path], None]) -> None:
    port = 1  # of rank 0, which takes another one
    if rank == 0:
        dist.TCPStore = store_at_any_port(lambda chosen: (folder / f"port-{chosen}").touch())
    else:
        wait_until(lambda: any(folder.glob("port-*")))
        port = int(next(folder.glob("port-*")).name.removeprefix("port-"))
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=str(port), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    error = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    function(rank, folder)


@contextmanager
def started(world_size: int, function: Callable[[int, Path], None], folder: Path) -> Iterator[list[ForkServerProcess]]:
    """Ranks in processes forked from a server that has imported torch."""
    context = rank_context()
    processes = [
        context.Process(target=rank_main, args=(rank, world_size, folder, function)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def end_of(processes: list[ForkServerProcess], seconds: float) -> list[int | None]:
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    return [process.exitcode for process in processes]


def record_of(folder: Path, rank: int) -> dict:
    return json.loads((folder / "errors" / f"rank-{rank}.json").read_text())


def raises_on_rank_1(rank: int, folder: Path) -> None:
    with rank_session("cpu", run_dir=folder) as session:
        group = dist.new_group([0, 1, 2])
        for step in range(1, 1000):
            session.phases.enter("step", step=step)
            if rank == 1 and step == 20:
                raise DataError("shard 7 is empty")
            if rank == 3:  # waits for nobody, and learns of the failure through the store
                time.sleep(0.1)
            else:
                dist.all_reduce(torch.ones(1), group=group)


def test_without_a_launcher_one_rank_writes_and_all_end(tmp_path) -> None:
    with started(4, raises_on_rank_1, tmp_path) as processes:
        assert end_of(processes, SECONDS_TO_END) == [DataError.exit_code] * 4
    said = [(tmp_path / f"stderr-{rank}").read_text() for rank in range(4)]
    assert re.match(r"rank 1 on \S+ \(phase step, step 20\) failed first:\n\nDataError: shard 7 is empty", said[1])
    for rank in (0, 2, 3):
        assert re.search(rf"^rank {rank} on .* ended after rank 1 on ", said[rank], re.MULTILINE)
        assert record_of(tmp_path, rank)["cause"]["message"] == "shard 7 is empty"


def is_late_on_rank_2(rank: int, folder: Path) -> None:
    """Rank 0 alone has a limit, and enters the step when all can read where the other ranks are."""
    with rank_session("cpu", run_dir=folder, timeouts=PhaseTimeouts(step=3 if rank == 0 else 1800)) as session:
        session.phases.enter("data", step=5)
        if rank == 2:
            read_a_slow_disk(session, folder)
        if rank == 0:
            wait_until(lambda: all((folder / f"published-{other}").exists() for other in (1, 2)))
        session.phases.enter("step")
        if rank == 1:
            wait_until_published(session)
            (folder / "published-1").touch()
        dist.all_reduce(torch.ones(1))


def read_a_slow_disk(session: RankSession, folder: Path) -> None:
    wait_until_published(session)
    (folder / "published-2").touch()
    time.sleep(1000)


def test_the_late_rank_is_named_with_its_phase_and_step(tmp_path) -> None:
    with started(3, is_late_on_rank_2, tmp_path) as processes:
        assert end_of(processes, 3 + SECONDS_TO_END) == [TrainingError.exit_code] * 3
    first = min((record_of(tmp_path, rank) for rank in (0, 1)), key=lambda record: record["followed"])
    assert first["message"].startswith("phase step has lasted ")
    assert "more than its 3 s. Late: rank 2 (phase data, step 5, for " in first["message"]
    assert first["message"].endswith("ranks 0 and 1 came further")
    assert first["late"] == [2]
    assert "read_a_slow_disk" in record_of(tmp_path, 2)["traceback"]


def loses_rank_0(rank: int, folder: Path) -> None:
    with rank_session("cpu", run_dir=folder):
        (folder / f"ready-{rank}").touch()
        time.sleep(1000)


def test_the_death_of_the_rank_that_serves_the_store_is_noticed(tmp_path) -> None:
    with started(2, loses_rank_0, tmp_path) as processes:
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
        processes[0].kill()
        assert end_of(processes, SECONDS_TO_END) == [-signal.SIGKILL, TrainingError.exit_code]
    assert "rank 0, which keeps the store at localhost:" in record_of(tmp_path, 1)["message"]


def ends_well(rank: int, folder: Path) -> None:
    with rank_session("cpu", run_dir=folder) as session:
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        time.sleep(1.2 * rank)  # rank 0, which serves the store, is done first
        (folder / f"value-{rank}").write_text(f"{value.item()} {session.environment.world_size}")
    assert not dist.is_initialized()


def test_success_leaves_no_record(tmp_path) -> None:
    with started(3, ends_well, tmp_path) as processes:
        assert end_of(processes, SECONDS_TO_END) == [0, 0, 0]
    assert [(tmp_path / f"value-{rank}").read_text() for rank in range(3)] == ["3.0 3"] * 3
    assert not (tmp_path / "errors").exists()


def session_in_a_world_of_others(rank: int, world_size: int) -> tuple[int, int, str]:
    try:
        with rank_session("cpu") as session:
            raise ValueError("passes through")
    except ValueError as error:
        return session.environment.rank, session.environment.world_size, str(error)


def test_a_world_that_others_initialized_is_used_and_left_alone() -> None:
    assert run_ranks(2, session_in_a_world_of_others) == [(0, 2, "passes through"), (1, 2, "passes through")]


def test_a_single_process_needs_no_group_and_errors_pass_through(tmp_path, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def fail() -> None:
        with rank_session("cpu", run_dir=tmp_path) as session:
            assert session.environment == RankEnvironment()
            assert not dist.is_initialized()
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_arrive_are_named() -> None:
    alone = RankEnvironment(0, 3, 0, 3, "localhost", 0, "variables")
    with pytest.raises(TrainingError, match=r"2 of 3 ranks did not arrive within 2 s: 1, 2"):
        initialize(alone, "cpu", PhaseTimeouts(init=2))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        busy = RankEnvironment(0, 3, 0, 3, "localhost", taken.getsockname()[1], "variables")
        with pytest.raises(ConfigError, match="rank 0 cannot listen on localhost:.*set another MASTER_PORT"):
            initialize(busy, "cpu", PhaseTimeouts(init=2))


def test_more_ranks_than_devices_is_an_error_before_any_work(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 6 is number 2 of 4 on .*, which has 2 CUDA devices"):
        select_device(RankEnvironment(6, 8, 2, 4, "a", 1, "torchrun"), "cuda")
    with pytest.raises(ConfigError, match="device type 'abacus'; use cpu or cuda"):
        select_device(RankEnvironment(), "abacus")


@pytest.mark.parametrize(("devices", "shared"), [("aa", True), ("ab", False)])
def test_two_ranks_on_one_gpu_are_an_error_on_both(monkeypatch, devices, shared) -> None:
    """As `CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2` starts them: each sees one device, number 0."""
    store, left = dist.HashStore(), list(devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(process_group.LAZY_GLOO, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=left.pop()))
    monkeypatch.setattr(process_group, "connect_store", lambda *_: store)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)

    def join(rank: int) -> str:
        try:
            initialize(RankEnvironment(rank, 2, rank, 2, "a", 1, "torchrun"), "cuda")
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as ranks:
        said = list(ranks.map(join, range(2)))
    for rank, message in enumerate(said):
        words = f"number {rank} of 2 on .* start at most 1 ranks there, or look at CUDA_VISIBLE_DEVICES=0"
        assert bool(re.search(words, message)) is shared, message


def test_phases_know_their_limits_and_an_error_keeps_the_inner_one() -> None:
    phases = Phases(PhaseTimeouts(step=7))
    phases.enter("step", step=4)
    with phases("save", timeout=2):
        assert phases.position[:2] == ("save", 4)
        assert phases.position.timeout == 2
    assert phases.position[:3] == ("step", 4, 3)
    assert phases.position.timeout == 7
    with pytest.raises(ValueError, match="full"), phases("save"):
        raise ValueError("disk full")
    assert phases.position.phase == "save"
    with pytest.raises(ConfigError, match=r"no phase 'sav'; phases are .* \(did you mean \"save\"\?\)"):
        phases.enter("sav")


def at(phase: str, entered: int, step: int = 17) -> Position:
    return Position(phase, step, entered, time.monotonic() - 40, 30)


def test_who_is_late() -> None:
    late, message = late_ranks(0, at("step", 9), {1: at("step", 9), 2: at("data", 8), 3: at("step", 9)})
    assert late == (2,)
    assert message == (
        "phase step has lasted 40 s on rank 0, more than its 30 s. "
        "Late: rank 2 (phase data, step 17, for 40 s); ranks 0, 1 and 3 came further"
    )
    late, message = late_ranks(0, at("step", 9), {1: at("step", 9)})
    assert late == ()
    assert "No rank is behind: all are in phase step, step 17" in message
