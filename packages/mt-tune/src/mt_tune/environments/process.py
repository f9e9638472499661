"""A process from which processes of dialogues are forked: `python -m mt_tune.environments.process CONTROL LIFELINE`.

CONTROL: descriptor of a socket to training, which sends a pickled `ProcessSetup`, and then a descriptor for each
process that it wants: the code of environments is imported once. Each of those holds one dialogue at a time, in the
protocol of `Dialogues.answered`. LIFELINE: as of mt_tune.rewards.worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mt_core.errors import MtError
from mt_tune.environments.dialogues import Dialogue, DialogueSource, as_reply
from mt_tune.environments.setup import SourceSetup
from mt_tune.rewards.calling import described
from mt_tune.rewards.channels import received, send_json
from mt_tune.rewards.worker import STANDARD_ERROR, STANDARD_OUTPUT, end_with_training, limit_memory

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@dataclass(frozen=True)
class ProcessSetup:
    """path: sys.path of training. memory_mb: address space beside what imports have taken."""

    sources: SourceSetup
    path: Sequence[str]
    memory_mb: int


def main() -> None:
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end_with_training(lifeline)
    # What environments print is not part of the results of a command.
    os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    setup = received(control)
    sys.path[:] = [*setup.path, *(entry for entry in sys.path if entry not in setup.path)]
    try:
        source = setup.sources.load()
    except Exception as error:
        send_json(control, {"error": problem(error, "cannot be imported: ")})
        return
    # The kernel takes processes that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    send_json(control, {"ready": True})
    _fork_processes(control, source, setup.memory_mb)


def _fork_processes(control: socket.socket, source: DialogueSource, memory_mb: int) -> None:
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            try:
                control.close()
                _hold_dialogues(socket.socket(fileno=descriptors[0]), source, memory_mb)
            finally:
                # Neither the loop above nor what libraries do at the end of a process is this one's.
                os._exit(0)
        os.close(descriptors[0])


def _hold_dialogues(channel: socket.socket, source: DialogueSource, memory_mb: int) -> None:
    # A group of its own, by which children of environments are ended too.
    os.setsid()
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    limit_memory(memory_mb)
    send_json(channel, {"process": os.getpid()})
    dialogues = Dialogues(source)
    while (request := received(channel)) is not None:
        send_json(channel, dialogues.answered(request))


class Dialogues:
    """One dialogue after another. Requests are {"begin": row}, {"reply": message} and {"end": true}."""

    def __init__(self, source: DialogueSource) -> None:
        self._source = source
        self._dialogue: Dialogue | None = None

    def answered(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """{"prompt", "tools"} of a dialogue that begins, else what a Reply has; {"error"} for what is raised."""
        try:
            if "begin" in request:
                return self._begun(request["begin"])
            assert self._dialogue is not None
            reply = self._dialogue.reply(request["reply"]) if "reply" in request else self._dialogue.end()
            return asdict(as_reply(reply))
        except Exception as error:
            return {"error": problem(error, "raised ")}

    def _begun(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._dialogue is not None:
            released, self._dialogue = self._dialogue, None
            self._source.release(released)
        self._dialogue = self._source.begin(row)
        return {"prompt": list(self._dialogue.prompt), "tools": self._dialogue.tools}


def problem(error: Exception, what: str) -> str:
    return str(error) if isinstance(error, MtError) else what + described(error)


if __name__ == "__main__":
    main()
