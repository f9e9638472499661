"""`mt` as a user types it: in this process where that is enough, in its own where it matters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from mt_cli import main


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
