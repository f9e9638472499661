"""How the suite runs, and `mt` as a user types it: in this process where that is enough, else in another."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

BYTECODE = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"


def keep_bytecode() -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, every process would compile all that it imports: torch in 2 more seconds.
    The tests and the processes that they start share compiled modules in a folder beside pytest's cache."""
    if not sys.dont_write_bytecode:
        return
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(BYTECODE)
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    os.environ["PYTHONPYCACHEPREFIX"] = str(BYTECODE)


keep_bytecode()

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from tests.long_tests import LongTests, listed  # noqa: E402

from mt_cli import main  # noqa: E402

pytest_plugins = ["tests.costs"]

# Other work on the machine slows an example or its drawing at random, which says nothing about what is tested.
settings.register_profile("mt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mt")

GIB_OF_A_WORKER = 4
"""Memory of a worker, of the server that it forks ranks from, and of 8 ranks."""
MOST_WORKERS = 8


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the suite with `&` has it ignore SIGINT, and so do all processes started here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # temporary files have names of their own in each run
        shutil.rmtree(BYTECODE / tempfile.gettempdir().strip("/"), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = LongTests(listed())
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")
        if item.get_closest_marker("exhaustive") or item.get_closest_marker("long"):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported and collected stays: garbage collections, half a second each, need not go over it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores, since tests wait for processes, disks and clocks a sixth of their time; as many as
    memory allows; none for single files, which are done before workers have started."""
    if not all(Path(argument).is_dir() for argument in config.args):
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // GIB_OF_A_WORKER, MOST_WORKERS))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A test may compute with more threads. They would wait for work, turning, through all later tests of the process:
    those with small tensors would take several times as long."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[list[str]]:
        """The words of each line of the output."""
        return [line.split() for line in self.out.splitlines()]


Mt = Callable[..., Outcome]


@pytest.fixture
def mt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Mt:
    """Runs `mt` with these arguments in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        kept, debug = main.take_debug([str(argument) for argument in arguments])
        capsys.readouterr()
        code = main.run(kept, debug=debug)
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return call


@pytest.fixture
def mt_process() -> Mt:
    """Runs `mt` with these arguments in a process of its own."""

    def call(*arguments: object, **environment: str) -> Outcome:
        command = [sys.executable, "-c", "from mt_cli.main import main; main()", *map(str, arguments)]
        env = {**os.environ, "COLUMNS": "200", **environment}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call
