"""Running generated programs: each in a process of its own, with limits.

The limits keep mistakes of a program from the machine: time, memory, files, and where Linux allows it network and
processes that stay. A program that means harm can still read files; run such in a container without anything of value.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mt_core.errors import ConfigError

WORKER = Path(__file__).with_name("limited_process.py")
PASSED = 97
"""Exit status of a program that reached its end; one that leaves early with 0 has not run its tests."""
ISOLATED = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
"""util-linux: no network interfaces, and all processes end with the first one."""
REASON_BYTES = 2000


@dataclass(frozen=True)
class Limits:
    """seconds: of the clock, and of the CPU. memory_mb: address space. file_mb: of each file that is written."""

    seconds: int = 10
    memory_mb: int = 1024
    file_mb: int = 16

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "file_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class ProgramRunner:
    """Runs Python programs. isolates: whether they have no network."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.isolates = _can_isolate()

    def failure(self, program: str) -> str | None:
        """Why a program has not reached its end; None if it has. Its folder is its own, and is removed."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "program.py"
            # PASSED is the status only if the program ran to its end: nothing before has raised or exited.
            file.write_text(f"{program}\nraise SystemExit({PASSED})\n", encoding="utf-8")
            with (Path(folder) / "errors").open("wb+") as errors:
                status = self._status(file, errors.fileno())
                # Only the end is read: a program may write up to file_mb of errors.
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - REASON_BYTES))
                lines = errors.read().decode(errors="replace").strip().splitlines()
        if status == PASSED:
            return None
        if status is None:
            return f"did not end within {self.limits.seconds} s"
        return lines[-1] if lines else f"ended with status {status}"

    def _status(self, file: Path, errors: int) -> int | None:
        """The exit status; None for a program that was ended."""
        limits = [str(getattr(self.limits, name)) for name in ("seconds", "memory_mb", "file_mb")]
        process = subprocess.Popen(
            # -I: no PYTHON* variables, no user site, not the working folder on sys.path.
            [*(ISOLATED if self.isolates else ()), sys.executable, "-I", str(WORKER), *limits, str(file)],
            cwd=file.parent,
            # No variables of this process: they may hold keys.
            env={"PATH": os.defpath, "HOME": str(file.parent), "TMPDIR": str(file.parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # A process group of its own, by which `_end` reaches its children.
            start_new_session=True,
        )
        try:
            # Limits of the CPU do not end a program that sleeps.
            return process.wait(self.limits.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the processes that it started."""
    with suppress(ProcessLookupError):
        # Children that left the group (setsid) survive this; unshare ends them with their PID namespace.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _can_isolate() -> bool:
    if shutil.which(ISOLATED[0]) is None:
        return False
    # unshare may be installed but forbidden (user namespaces off, a container), so that it is tried.
    return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0
