"""The first thing that runs in a launched rank: ties its life to the launcher's, sends its output to its log, and
becomes the rank's program (same process, by exec).

python -m mt_core.launch.rank_entry LAUNCHER_PID LOG STREAMS PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when its parent dies; it survives exec."""


def main(arguments: list[str]) -> NoReturn:
    launcher, log, streams, *program = arguments
    end_with_parent(int(launcher))
    if streams:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for stream in streams.split(","):
            os.dup2(descriptor, int(stream))
        os.close(descriptor)
    os.execvp(program[0], program)


def end_with_parent(parent: int) -> None:
    """No rank outlives its launcher, however that ends. Other systems than Linux have no such call."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
