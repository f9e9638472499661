"""Running generated programs: each in processes and a folder of its own, with limits.

In user namespaces (Linux) a program has no network, sees no process but its own, and writes nowhere but to its folder.
It can read files that the user can read: run what may mean harm in a container without anything of value.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, TypeVar

from mt_core.errors import ConfigError

WORKER = Path(__file__).with_name("limited_process.py")
ISOLATED = (
    "unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--mount", "--mount-proc", "--fork",
    "--kill-child",
)  # fmt: skip
"""util-linux: no network interfaces, and all processes end with the first one, which `WORKER` is."""
REASON_BYTES = 2000
REFUSED_PROCESS = "BlockingIOError: [Errno 11]"
"""What Python reports of a fork that the kernel refuses."""
GivenT = TypeVar("GivenT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Limits:
    """seconds: of the clock, and of each process's CPU. memory_mb: address space of a process, and memory of all
    together. file_mb: of all files together, and of each one. processes: at a time."""

    seconds: int = 10
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name}={getattr(self, field.name)} must be at least 1")


class ProgramRunner:
    """Runs Python programs, `workers` at a time (None: one for each CPU).

    Raises ConfigError where programs cannot be isolated, unless allow_unisolated: they then could end this process,
    read its environment, use the network and write the user's files, and file_mb limits each file alone. option: how
    the user allows that, for the message.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        workers: int | None = None,
        allow_unisolated: bool = False,
        option: str = "--allow-unisolated",
    ) -> None:
        self.limits, self.workers = limits, workers or len(os.sched_getaffinity(0))
        self.isolates = True
        if failure := self.failure(""):
            if not allow_unisolated:
                raise ConfigError(
                    f"programs cannot be isolated on this machine ({failure}): unshare of util-linux, user namespaces "
                    "and Linux 5.12 are needed. A program could end this process, read its environment and use the "
                    f"network; in a container without anything of value allow that with {option}"
                )
            self.isolates = False

    def map(self, function: Callable[[GivenT], FoundT], inputs: Iterable[GivenT]) -> Iterator[FoundT]:
        """Results for each, in their order, `workers` at a time. A consumer that stops ends what has not begun."""
        pool = ThreadPoolExecutor(self.workers)
        try:
            yield from pool.map(function, inputs)
        finally:
            pool.shutdown(cancel_futures=True)

    def failure(self, program: str) -> str | None:
        """Why a program has not reached its end; None if it has. Its folder is its own, and is removed."""
        try:
            source = program.encode()
        except UnicodeEncodeError as error:
            return f"the program is no text: {error}"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "program.py"
            file.write_bytes(source)
            with (Path(folder) / "errors").open("wb+") as errors, (Path(folder) / "excess").open("wb+") as excess:
                reached_end, status = self._outcome(file, errors.fileno(), excess.fileno())
                lines = _last_lines(excess) or _last_lines(errors)
        if status is None:
            return f"did not end within {self.limits.seconds} s"
        # The status too: a process that the program has forked may reach the end that the program does not.
        if reached_end and status == 0:
            return None
        # The kernel may refuse a process before the watching one has counted one too many. Several processes of the
        # program may be refused one, so that lines of others follow.
        if refused := [line for line in lines if line.startswith(REFUSED_PROCESS)]:
            return f"{refused[-1]} (more than {self.limits.processes} processes are refused)"
        return lines[-1] if lines else f"ended with status {status}{'' if reached_end else ', before its end'}"

    def _outcome(self, file: Path, errors: int, excess: int) -> tuple[bool, int | None]:
        """Whether the program reached its end, and the exit status; None for one that was ended."""
        # No status says that a program reached its end: it may leave with any. The secret of the run does, which is
        # read behind the program's last statement.
        secret = secrets.token_hex(16).encode()
        (secret_reader, secret_writer), (end_reader, end_writer) = os.pipe(), os.pipe()
        try:
            os.write(secret_writer, secret)
            os.close(secret_writer)
            status = self._status(file, errors, (secret_reader, end_writer, excess))
            os.set_blocking(end_reader, False)
            with suppress(BlockingIOError):
                return os.read(end_reader, 2 * len(secret)) == secret, status
            return False, status
        finally:
            for descriptor in (secret_reader, end_reader, end_writer):
                os.close(descriptor)

    def _status(self, file: Path, errors: int, descriptors: Sequence[int]) -> int | None:
        files = file.parent / "files"
        files.mkdir()
        try:
            process = subprocess.Popen(
                self._command(file, descriptors),
                cwd=files,
                # No variable of this process: they may hold keys.
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=descriptors,
                # A session and process group of its own, by which `_end` reaches its children.
                start_new_session=True,
            )
        except FileNotFoundError as error:  # unshare
            os.write(errors, str(error).encode())
            return -1
        try:
            # Limits of the CPU do not end a program that sleeps.
            return process.wait(self.limits.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)

    def _command(self, file: Path, descriptors: Sequence[int]) -> list[str]:
        isolation = [shutil.which(ISOLATED[0]) or ISOLATED[0], *ISOLATED[1:]] if self.isolates else []
        limits = [str(getattr(self.limits, name)) for name in ("seconds", "memory_mb", "file_mb", "processes")]
        # -I: no user site, not the working folder on sys.path.
        worker = [sys.executable, "-I", str(WORKER), "watch", *limits, str(int(self.isolates))]
        return [*isolation, *worker, str(file), *map(str, descriptors)]


def _last_lines(file: BinaryIO) -> list[str]:
    """The last lines, of its end alone: a program may write up to file_mb of errors."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - REASON_BYTES))
    return file.read().decode(errors="replace").strip().splitlines()


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the processes that it started."""
    with suppress(ProcessLookupError):
        # Children that left the group (setsid) survive this; unshare ends them with their PID namespace.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
