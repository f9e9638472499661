"""A command of mt on ranks of `run_ranks`, which cost a tenth of the processes that `--nproc` starts.

How `--nproc` starts them is tested in tests/dist/test_launch_local.py and tests/cli/test_train_command.py.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from mt_core.testing import run_ranks


def mt_on_ranks(world_size: int, *arguments: object) -> str:
    """The output of rank 0; fails where a rank does not end with 0."""
    found: list[tuple[int, str, str]] = run_ranks(world_size, run_as_rank, [str(argument) for argument in arguments])
    for code, _, err in found:
        assert code == 0, err
    return found[0][1]


def run_as_rank(rank: int, world: int, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    from mt_cli.main import run

    # The address has to be set, and is not used: the ranks are connected.
    os.environ |= {"COLUMNS": "200", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(arguments)
    return code, out.getvalue(), err.getvalue()
