"""Requests to a running training, as files in `control` of its run directory (`mt ctl`). Needs no torch.

A request is `request-ID.json`: {"command", "argument", "by", "time", "until"}. It is written under another name and
renamed, so that the run reads all of it or nothing. After `until` (seconds since the epoch, null for ever) the run
refuses it: who asked waits no more. The run answers with `answer-ID.json`: {"ok", "text", "iteration", "time"}, and
removes the request. Files work over a shared file system, from a machine that cannot reach those of the run.

A request is read only if it is a regular file that belongs to the user of the run (or to root) and that nobody else may
write, in a folder of which the same holds.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError

CONTROL_FOLDER = "control"
REQUEST, ANSWER = "request-", "answer-"
MOST_BYTES = 65536
"""Size of a request: a prompt fits, and nothing that would fill the memory."""


@dataclass(frozen=True)
class RunRequest:
    """command: name of a registered request. argument: what stands after it. by: the user who asks."""

    id: str
    command: str
    argument: str
    by: str


@dataclass(frozen=True)
class RunAnswer:
    ok: bool
    text: str
    iteration: int


def write_request(run_dir: Path, command: str, argument: str = "", seconds: float | None = None) -> RunRequest:
    """Ask the run of a directory. seconds: for which the request is wanted; None for ever. Raises ConfigError where the
    directory is none of a run, or cannot be written."""
    require_run_directory(run_dir)
    request = RunRequest(uuid.uuid4().hex[:12], command, argument, _user())
    folder = run_dir / CONTROL_FOLDER
    now = time.time()
    until = None if seconds is None else now + seconds
    content = {"command": command, "argument": argument, "by": request.by, "time": now, "until": until}
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _write(folder / f"{REQUEST}{request.id}.json", content)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; a run is asked by the user who started it") from error
    return request


def require_run_directory(run_dir: Path) -> None:
    if not (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.json")


def withdraw(run_dir: Path, request: RunRequest) -> bool:
    """Take back a request that was not read. Whether it was there."""
    path = run_dir / CONTROL_FOLDER / f"{REQUEST}{request.id}.json"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def read_answer(run_dir: Path, request: RunRequest) -> RunAnswer | None:
    """The answer, which is removed; None where there is none yet."""
    path = run_dir / CONTROL_FOLDER / f"{ANSWER}{request.id}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return RunAnswer(bool(content["ok"]), str(content["text"]), int(content["iteration"]))


# -- the side of the run -----------------------------------------------------------------------------


class RequestFolder:
    """Reads the requests of a run directory, at most once in `interval` seconds."""

    def __init__(self, run_dir: Path, interval: float = 1.0) -> None:
        self.folder, self.interval = run_dir / CONTROL_FOLDER, interval
        self._next = 0.0
        self._waiting: list[RunRequest] = []

    def waits(self) -> bool:
        """Whether a request waits."""
        if not self._waiting and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.interval
            self._waiting = self._read()
        return bool(self._waiting)

    def take(self) -> list[RunRequest]:
        """The requests that wait, in the order in which they were written."""
        taken, self._waiting = self._waiting, []
        return taken

    def answer(self, request: RunRequest, *, ok: bool, text: str, iteration: int) -> None:
        content = {"ok": ok, "text": text, "iteration": iteration, "time": time.time()}
        _write(self.folder / f"{ANSWER}{request.id}.json", content)

    def _read(self) -> list[RunRequest]:
        try:
            names = [name for name in os.listdir(self.folder) if name.startswith(REQUEST) and name.endswith(".json")]
            if not names or _refusal(self.folder.lstat(), stat.S_ISDIR):
                return []
            ages = {name: (self.folder / name).lstat().st_mtime_ns for name in names}
        except OSError:
            return []
        read = (self._read_one(self.folder / name) for name in sorted(ages, key=lambda name: (ages[name], name)))
        return [request for request in read if request is not None]

    def _read_one(self, path: Path) -> RunRequest | None:
        """None for a file that is not read; it is removed, and answered where its reason can be told."""
        id_ = path.name.removeprefix(REQUEST).removesuffix(".json")
        try:
            # Without following a link or waiting for a pipe, and the file that is checked is the one that is read.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if _refusal(os.fstat(descriptor), stat.S_ISREG):
                return None
            data = file.read(MOST_BYTES + 1)
        path.unlink(missing_ok=True)
        try:
            content: Any = json.loads(data) if len(data) <= MOST_BYTES else None
            request = RunRequest(id_, str(content["command"]), str(content.get("argument", "")), str(content["by"]))
            until = math.inf if content.get("until") is None else float(content["until"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.answer(RunRequest(id_, "", "", ""), ok=False, text="this is no request of mt ctl", iteration=-1)
            return None
        if time.time() > until:
            # Whoever asked waits no more, unless the clocks of both machines differ.
            self.answer(request, ok=False, text=f"the request was wanted until {_clock(until)} alone", iteration=-1)
            return None
        return request


def _refusal(status: os.stat_result, is_kind: Any) -> bool:
    """Whether a file or folder is of another kind, of another user, or open to the writes of others."""
    others_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return not is_kind(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or others_write


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
