"""`--nproc` with ranks of `run_ranks`, which cost a tenth of processes that import everything themselves.

How a command starts its processes is tested in tests/dist/test_launch_local.py and tests/moe/test_dispatcher_wheel.py.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

import pytest

from mt_core.testing import run_ranks


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands with `--nproc` run on forked ranks from now on, with the words that they give to the launcher."""
    monkeypatch.setattr("mt_core.launch.local.launch", launch_forked)


def launch_forked(nproc: int, arguments: Sequence[str], **_: object) -> int:
    """Shows the output of rank 0, and the errors of the first rank that failed; returns its exit code, or 0."""
    # As the launcher: rank 0 has the terminal, and the exit code is that of a rank that failed.
    found = run_ranks(nproc, run_as_rank, arguments)
    sys.stdout.write(found[0][1])
    code, _, errors = next((one for one in found if one[0]), found[0])
    sys.stderr.write(errors)
    return code


def run_as_rank(rank: int, world: int, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    from mt_cli.main import run

    # The address has to be set, and is not used: the ranks are connected.
    os.environ |= {"COLUMNS": "200", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = run(arguments)
    return code, out.getvalue(), errors.getvalue()
