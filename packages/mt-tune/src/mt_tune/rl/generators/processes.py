"""The processes that generate, seen from the process that has started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mt_core.errors import TrainingError
from mt_tune.rl.generators.messages import Answer, GeneratorSetup, Message

PROGRAM = "mt_tune.rl.generators.process"
POLL_SECONDS, END_SECONDS = 0.5, 10.0
LAUNCHER_VARIABLES = ("MT_LAUNCH_DIR", "SLURM_STEP_ID", "TORCHELASTIC_")
"""By which a process is taken for a rank of training."""


@dataclass
class GeneratorProcess:
    """One of them. rank: among the generators."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Connection

    @property
    def name(self) -> str:
        return f"generator {self.rank} (process {self.process.pid})"

    def failure(self) -> TrainingError:
        """Error that names a process that has ended by itself."""
        try:
            code: int | None = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its channel" if code is None else f"ended with exit status {code}"
        how = f"was ended by signal {-code}" if code is not None and code < 0 else how
        return TrainingError(
            f"{self.name} {how}, so that no more completions can be drawn; what it wrote is in the log of the run. "
            "Resume the run from its last checkpoint; rl.generator_processes=0 draws in the processes that train"
        )


class GeneratorProcesses:
    """Those that this process has started, which are none on most processes. Messages and answers alternate."""

    def __init__(self, setups: Iterable[GeneratorSetup]) -> None:
        self.started = [start_process(setup) for setup in setups]

    def send(self, messages: Mapping[int, Message]) -> None:
        """A message to each, by its rank. Raises TrainingError where one has ended."""
        for generator in self.started:
            try:
                generator.channel.send(messages[generator.rank])
            except OSError as error:
                raise generator.failure() from error

    def answers(self) -> dict[int, Answer]:
        """The answer of each to the last message, by rank. Raises what one of them raised, and TrainingError where one
        has ended."""
        answers: dict[int, Answer] = {}
        while waiting := [generator for generator in self.started if generator.rank not in answers]:
            arrived = wait([generator.channel for generator in waiting], POLL_SECONDS)
            for generator in waiting:
                # A process that was killed may have children that hold the other end, so that it stays open.
                if generator.channel in arrived or generator.process.poll() is not None:
                    answers[generator.rank] = received(generator)
        return answers

    def close(self) -> None:
        """Ends them: at once where one still draws."""
        for generator in self.started:
            generator.channel.close()
            generator.process.terminate()
        for generator in self.started:
            try:
                generator.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                generator.process.kill()
                generator.process.wait()
        self.started = []


def received(generator: GeneratorProcess) -> Answer:
    """Raises TrainingError where there will be no answer, and the error of the answer."""
    try:
        # May be a last answer of a process that has ended since.
        answer: Answer | None = generator.channel.recv() if generator.channel.poll() else None
    except (EOFError, OSError) as error:
        raise generator.failure() from error
    if answer is None:
        raise generator.failure()
    if answer.error is not None:
        raise answer.error
    return answer


def start_process(setup: GeneratorSetup) -> GeneratorProcess:
    """Send the process its setup."""
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(there.fileno()), str(os.getpid())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment_of(setup, os.environ),
        )
    channel = Connection(here.detach())
    started = GeneratorProcess(setup.rank, process, channel)
    try:
        channel.send(setup)
    except OSError as error:
        raise started.failure() from error
    return started


def environment_of(setup: GeneratorSetup, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of training, in which the process is one of a world of generators."""
    kept = {name: value for name, value in environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    world: dict[str, Any] = {
        "RANK": setup.rank,
        "WORLD_SIZE": setup.size,
        "LOCAL_RANK": setup.rank,
        "LOCAL_WORLD_SIZE": setup.size,
        "MASTER_ADDR": setup.address,
        "MASTER_PORT": setup.port,
    }
    return kept | {name: str(value) for name, value in world.items()}
