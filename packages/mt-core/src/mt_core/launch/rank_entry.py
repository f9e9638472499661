"""Entry point of a launched rank: arranges that it dies with the launcher, redirects its output to its log, and
execs the rank's program.

python -m mt_core.launch.rank_entry LAUNCHER_PID LOG STREAMS PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal sent to this process when its parent dies; preserved by exec."""


def main(arguments: list[str]) -> NoReturn:
    launcher, log, streams, *program = arguments
    end_with_parent(int(launcher))
    if streams:
        # O_APPEND: stdout and stderr share the file, and so may child processes.
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for stream in streams.split(","):
            os.dup2(descriptor, int(stream))
        os.close(descriptor)
    # exec keeps the process id, which the launcher supervises.
    os.execvp(program[0], program)


def end_with_parent(parent: int) -> None:
    """Die with the launcher, even if it is killed. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
