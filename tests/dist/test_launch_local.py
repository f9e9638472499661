"""Launched ranks: the first failure is shown first and alone, nobody is left, and the exit code says it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch.distributed as dist
from tests.dist.launching import store_at_any_port

from mt_core.errors import ConfigError, DataError
from mt_core.launch.local import Placement, check_placement, launch
from mt_core.launch.processes import DelayedView

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SECONDS_TO_END = 60
"""From the failure to the end of every rank, on a busy machine; on an idle one it takes up to 15."""

LOOP = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from mt_core.launch.session import rank_session
from tests.dist.launching import wait_until_published

how, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
with rank_session("cpu", run_dir=folder) as session:
    rank = session.environment.rank
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    print("hello from", rank, flush=True)
    for step in range(1, 100000):
        session.phases.enter("step", step=step)
        if step == 10 and rank == session.environment.world_size // 2 and how != "kill":
            (folder / "failed-at").write_text(str(time.time()))
            raise ValueError("out of paper")
        dist.all_reduce(torch.ones(1000))
        if step == 12:
            wait_until_published(session)
            (folder / f"reached-{rank}").write_text(str(step))
        time.sleep(0.05)
"""

PLAIN = """
import os, signal, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
received = []
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
(folder / f"pid-{rank}").write_text(str(os.getpid()))
print("out", rank, flush=True)
print("err", rank, file=sys.stderr, flush=True)
while not received:
    if sys.argv[1] == "exit" and rank == 1:
        raise LookupError("no such shelf")
    time.sleep(0.02)
(folder / f"heard-{rank}").write_text("once")
if sys.argv[1] == "deaf":
    time.sleep(1000)
if sys.argv[1] == "interrupted":
    time.sleep(0.2 * rank)
(folder / f"saved-{rank}").write_text("")
if sys.argv[1] == "interrupted":
    sys.exit(75)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The command line of a rank's program, which may import tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def command(source: str, how: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(source)
        return [sys.executable, str(path), how, str(tmp_path)]

    return command


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def wait_for(*paths: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def assert_gone(folder: Path, ranks: range) -> None:
    for rank in ranks:
        pid = int((folder / f"pid-{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_traceback_of_the_first_rank_to_fail_comes_first_and_alone(program, tmp_path, capfd) -> None:
    assert launch(3, [], entry=program(LOOP, "raise"), run_dir=tmp_path) == 1
    assert time.time() - float((tmp_path / "failed-at").read_text()) < SECONDS_TO_END
    assert_gone(tmp_path, range(3))
    captured = capfd.readouterr()
    host = socket.gethostname()
    assert captured.err.startswith(f"rank 1 on {host} (phase step, step 10) failed first:\n\n")
    assert captured.err.count("Traceback") == 1
    assert "ValueError: out of paper" in captured.err
    assert re.search(r"\nRanks 0 and 2 followed\.\n", captured.err)
    assert captured.out == "hello from 0\n"
    record = json.loads((tmp_path / "errors" / "rank-1.json").read_text())
    assert (record["rank"], record["phase"], record["step"], record["exit_code"]) == (1, "step", 10, 1)
    assert 'raise ValueError("out of paper")' in record["traceback"]
    assert (tmp_path / "logs" / "rank-1.log").read_text().startswith("hello from 1\n")


RECORDING = """
import os, sys, time
from pathlib import Path
from mt_core.errors import DataError
from mt_core.launch.environment import LAUNCHED_BY_MT, read_environment
from mt_core.launch.failure import describe_failure, write_failure
from mt_core.launch.phases import Position

environment, folder = read_environment(), Path(os.environ[LAUNCHED_BY_MT])

def wait_for_records(ranks):
    while not all((folder / "errors" / f"rank-{rank}.json").exists() for rank in ranks):
        time.sleep(0.02)

wait_for_records(range(environment.rank + 1, 3))  # rank 2 first
error = RuntimeError("Connection closed by peer") if environment.rank == 0 else DataError("shard 7 is empty")
write_failure(describe_failure(error, environment, Position("data", 4)), folder)
wait_for_records(range(3))
sys.exit(DataError.exit_code if environment.rank else 1)
"""


def test_an_error_of_the_user_is_shown_by_its_message_and_gives_the_exit_code(program, tmp_path, capfd) -> None:
    assert launch(3, [], entry=program(RECORDING, ""), run_dir=tmp_path) == DataError.exit_code
    shown = capfd.readouterr().err
    assert re.match(r"rank 2 on \S+ \(phase data, step 4\) failed first:\n\nDataError: shard 7 is empty\n", shown)
    assert "Traceback" not in shown
    assert "Rank 1 failed with the same error.\nRank 0 followed.\n" in shown


REFUSED = """
import sys
from pathlib import Path
from mt_core.errors import ConfigError
from mt_core.launch.session import rank_session

folder = Path(sys.argv[2])
with rank_session("cpu", run_dir=folder) as session:
    if sys.argv[1]:
        (folder / sys.argv[1]).touch()
    raise ConfigError("no such layout")
"""


@pytest.mark.parametrize(("how", "left"), [("", None), ("metrics.jsonl", {"metrics.jsonl", "logs", "errors"})])
def test_a_refusal_leaves_no_folder_and_a_run_keeps_its_own(program, tmp_path, capfd, how: str, left: Any) -> None:
    folder = tmp_path / "run"
    entry = [*program(REFUSED, how)[:-1], str(folder)]
    assert launch(2, [], entry=entry, run_dir=folder) == ConfigError.exit_code
    assert (None if not folder.exists() else {path.name for path in folder.iterdir()}) == left
    shown = capfd.readouterr().err
    assert "ConfigError: no such layout" in shown
    assert ("Logs of the ranks" in shown) == (left is not None)


def test_when_a_rank_is_killed_in_a_step_the_others_end_and_its_death_is_the_cause(program, tmp_path, capfd) -> None:
    killed: list[float] = []

    def kill_rank_1() -> None:
        wait_for(tmp_path / "reached-1")
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        killed.append(time.monotonic())

    killer = in_background(kill_rank_1)
    assert launch(2, [], entry=program(LOOP, "kill"), run_dir=tmp_path) == 128 + signal.SIGKILL
    killer.join()
    assert time.monotonic() - killed[0] < SECONDS_TO_END
    assert_gone(tmp_path, range(2))
    shown = capfd.readouterr().err
    assert re.match(r"rank 1 on \S+ \(phase step, step \d+\) failed first:\n\nSIGKILL: killed", shown)
    assert "Rank 0 followed." in shown
    follower = json.loads((tmp_path / "errors" / "rank-0.json").read_text())
    assert follower["followed"]
    assert follower["phase"] == "step"


def test_a_rank_that_leaves_no_record_is_shown_with_the_end_of_its_log(program, tmp_path, capfd) -> None:
    started = time.monotonic()
    assert launch(2, [], entry=program(PLAIN, "exit"), run_dir=tmp_path) == 1
    assert time.monotonic() - started < SECONDS_TO_END
    shown = capfd.readouterr().err
    assert shown.split("rank 1 on")[0] in ("", "err 0\n")
    assert "LookupError: no such shelf" in shown
    assert "Rank 0 had not failed and was ended." in shown
    assert_gone(tmp_path, range(2))


@pytest.mark.parametrize(("how", "status"), [("save", 0), ("interrupted", 75)])
def test_the_first_signal_lets_ranks_save(program, tmp_path, capfd, how: str, status: int) -> None:
    """The status of an interrupted rank is no failure, which would end the others before they have saved."""

    def stop() -> None:
        wait_for(*(tmp_path / f"pid-{rank}" for rank in range(3)))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    in_background(stop)
    assert launch(3, [], entry=program(PLAIN, how), run_dir=tmp_path) == status
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(3))
    assert signal.getsignal(signal.SIGTERM) is before
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("out 0\n", "err 0\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "out 1\nerr 1\n"


def test_the_second_signal_kills(program, tmp_path, capfd) -> None:
    def stop() -> None:
        wait_for(*(tmp_path / f"pid-{rank}" for rank in range(2)))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(*(tmp_path / f"heard-{rank}" for rank in range(2)))
        os.kill(os.getpid(), signal.SIGTERM)

    started = time.monotonic()
    in_background(stop)
    assert launch(2, [], entry=program(PLAIN, "deaf"), run_dir=tmp_path) == 128 + signal.SIGTERM
    assert time.monotonic() - started < SECONDS_TO_END
    assert not (tmp_path / "saved-0").exists()
    assert_gone(tmp_path, range(2))


def test_an_interrupt_before_a_rank_can_save_is_no_failure(program, tmp_path, capfd) -> None:
    def interrupt() -> None:
        wait_for(*(tmp_path / f"pid-{rank}" for rank in range(2)))
        os.kill(os.getpid(), signal.SIGINT)

    in_background(interrupt)
    assert launch(2, [], entry=program(PLAIN, "save"), run_dir=tmp_path) == 128 + signal.SIGINT
    assert "failed" not in capfd.readouterr().err


def test_no_rank_outlives_a_launcher_that_is_killed(program, tmp_path) -> None:
    call = f"launch(2, [], entry={program(PLAIN, 'deaf')!r}, run_dir={str(tmp_path)!r})"
    source = f"from mt_core.launch.local import launch\n{call}\n"
    launcher = os.posix_spawn(sys.executable, [sys.executable, "-c", source], os.environ)
    wait_for(*(tmp_path / f"pid-{rank}" for rank in range(2)))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    # They are not children of this process, which cannot wait for them.
    end = time.monotonic() + SECONDS_TO_END
    ranks = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    while any(is_running(pid) for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in ranks)


def is_running(pid: int) -> bool:
    """A zombie that nobody reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


NODES = """
import os, sys, time
from pathlib import Path
from mt_core.launch.session import rank_session
from tests.dist.launching import wait_until_published

folder = Path(sys.argv[2])
with rank_session("cpu") as session:
    rank = session.environment.rank
    session.phases.enter("data", step=3)
    wait_until_published(session)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(1000 if sys.argv[1] == "sleep" else 0.2 * rank)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    # Two nodes end well in the training below, too.
    "how",
    ["sleep", pytest.param("end", marks=pytest.mark.exhaustive)],
)
def test_a_death_on_one_node_ends_the_ranks_of_the_other(program, tmp_path, capfd, monkeypatch, how) -> None:
    """Ranks that communicate nothing: they learn of it through the store."""
    chosen: Queue[int] = Queue()
    monkeypatch.setattr(dist, "TCPStore", store_at_any_port(chosen.put))
    codes: dict[int, int] = {}
    entry = program(NODES, how)

    def launch_node(node: int) -> None:
        port = chosen.get(timeout=SECONDS_TO_END) if node else 0
        folder = tmp_path / f"node{node}"
        codes[node] = launch(
            1, [], nnodes=2, node_rank=node, master_addr="localhost", master_port=port, entry=entry, run_dir=folder
        )

    killed: list[float] = []

    def kill() -> None:
        wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        killed.append(time.monotonic())

    other = in_background(lambda: launch_node(1))
    if how == "sleep":
        in_background(kill)
    launch_node(0)
    other.join()
    if how == "end":
        assert codes == {0: 0, 1: 0}
        return
    assert time.monotonic() - killed[0] < SECONDS_TO_END
    assert codes == {0: 128 + signal.SIGKILL, 1: 128 + signal.SIGKILL}
    shown = re.findall(r"rank 1 on \S+ \(phase data, step 3\) failed first:\n\nSIGKILL", capfd.readouterr().err)
    assert len(shown) == 2  # each launcher says it


@pytest.mark.long
def test_two_nodes_that_are_started_alike_train_to_the_end(tmp_path, monkeypatch) -> None:
    """Each node's ranks compare all that they were started with, then train, save and evaluate together."""
    chosen: Queue[int] = Queue()
    monkeypatch.setattr(dist, "TCPStore", store_at_any_port(chosen.put))
    settings = ["model.num_layers=2", "model.hidden_size=32", "data.seq_length=16", "train.train_iters=3"]
    settings += ["data.corpus_bytes=200000", "train.eval_iters=1", "train.sample_prompt=null"]
    arguments = ["train", "--preset", "gpt-tiny", "--run-dir", str(tmp_path / "run")]
    arguments += [word for setting in settings for word in ("--set", setting)]
    codes: dict[int, int] = {}

    def launch_node(node: int) -> None:
        port = chosen.get(timeout=SECONDS_TO_END) if node else 0
        place = {"nnodes": 2, "node_rank": node, "master_addr": "localhost", "master_port": port}
        codes[node] = launch(1, arguments, run_dir=tmp_path / f"node{node}", **place)

    other = in_background(lambda: launch_node(1))
    launch_node(0)
    other.join()
    assert codes == {0: 0, 1: 0}
    assert (tmp_path / "run" / "checkpoints" / "iter_0000003").is_dir()


def test_what_rank_0_says_waits_for_the_launcher_to_know_of_failures(tmp_path) -> None:
    log, shown = tmp_path / "rank-0.log", io.BytesIO()
    view = DelayedView(log, shown, delay=0.2)
    view.pump()  # there is no log yet
    log.write_bytes(b"one\n")
    view.pump()
    assert shown.getvalue() == b""
    time.sleep(0.25)
    view.pump()
    assert shown.getvalue() == b"one\n"
    with log.open("ab") as file:
        file.write(b"two\n")
    view.finish()
    assert shown.getvalue() == b"one\ntwo\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ({"nproc": 0}, {}, "--nproc 0 and --nnodes 1 must be at least 1"),
        ({"nnodes": 2}, {}, "--nnodes 2 needs --master-addr"),
        ({"nnodes": 2, "node_rank": 2}, {}, "--node-rank 2 is not below --nnodes 2"),
        ({}, {"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 is set: this process is a rank already; drop --nproc"),
        ({}, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "SLURM_NTASKS=8: srun runs .* drop"),
    ],
)
def test_launches_that_cannot_be(monkeypatch, arguments, variables, words) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        launch(**{"nproc": 2, "arguments": [], **arguments})


def test_two_nodes_of_one_machine_may_meet_on_its_loopback_interface() -> None:
    """As when two nodes are rehearsed: the address is refused only where it is not given."""
    check_placement(Placement(1, nnodes=2, master_addr="127.0.0.1", master_port=29500), {})
    with pytest.raises(ConfigError, match="--nnodes 2 needs --master-addr"):
        check_placement(Placement(1, nnodes=2, master_port=29500), {})
    assert Placement(2).address == "127.0.0.1"
