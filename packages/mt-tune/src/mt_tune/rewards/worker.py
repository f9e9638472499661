"""A process in which reward functions are called: `python -m mt_tune.rewards.worker CHANNEL LIFELINE`.

CHANNEL: descriptor of a socket to the pool, which sends pickled `Setup` and then one `Call` after another, and receives
JSON, so that nothing that a reward function has touched is unpickled by training. Functions are called in the main
thread, where the signals work by which math-verify bounds its time.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mt_core.errors import MtError
from mt_tune.rewards.calling import Call, Failed, LoadedFunction, described
from mt_tune.rewards.channels import received, send_json
from mt_tune.rewards.references import FunctionReference

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


@dataclass(frozen=True)
class Setup:
    """functions: by their numbers. path: sys.path of training. memory_mb: as rewards.memory_mb."""

    functions: Mapping[int, FunctionReference]
    path: Sequence[str]
    memory_mb: int


def main() -> None:
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end_with_training(lifeline)
    # What functions print is not part of the results of a command.
    os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    setup = received(channel)
    sys.path[:] = [*setup.path, *(entry for entry in sys.path if entry not in setup.path)]
    functions: dict[int, LoadedFunction] = {}
    for number, reference in setup.functions.items():
        try:
            functions[number] = LoadedFunction(reference.load())
        except Exception as error:
            send_json(channel, {"function": number, "error": _problem(error)})
            return
    limit_memory(setup.memory_mb)
    send_json(channel, {"ready": True})
    while (call := received(channel)) is not None:
        send_json(channel, asdict(_outcome(functions[call.function], call, setup.memory_mb)))


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, MtError) else f"cannot be imported: {described(error)}"


def _outcome(function: LoadedFunction, call: Call, memory_mb: int) -> Any:
    outcome = function.judge(call)
    if isinstance(outcome, Failed) and "MemoryError" in outcome.reason:
        return Failed(f"{outcome.reason}; its process may take {memory_mb} MiB (rewards.memory_mb)", outcome.sample)
    return outcome


def end_with_training(lifeline: int) -> None:
    """The kernel ends this process when training has ended, however it did and whatever a function is doing: nothing is
    ever written to this pipe, so that its only event is that the other end is closed."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


def limit_memory(memory_mb: int) -> None:
    """Address space from here on: what imports have taken, which is far more than they use, is not counted."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
