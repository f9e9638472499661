"""The record of a rank's failure: `errors/rank-N.json` in the run directory, written before any cleanup."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mt_core.errors import MtError
from mt_core.launch.environment import RankEnvironment
from mt_core.launch.phases import Position

ERRORS = "errors"
# 128 + SIGINT, as shells report it.
INTERRUPTED = 130

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|pair closure|failed to recv"
    r"|read error|write error|remote process exited|nccl(remote|system)error|store .* is gone|timed out .*waiting",
    re.IGNORECASE,
)
"""Error messages of gloo, NCCL and the store on ranks whose peer has exited."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. time: seconds since the epoch."""

    rank: int
    host: str
    phase: str
    step: int | None
    exception: str
    message: str
    traceback: str
    time: float
    exit_code: int
    expected: bool = False
    """An MtError: the message suffices, without a traceback."""
    followed: bool = False
    """This rank ended because of another's failure: its connection was lost, or the failure was announced."""
    late: tuple[int, ...] = ()
    """The ranks that others were waiting for."""
    cause: dict[str, Any] | None = None
    """The announced failure that this one followed."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Failure:
        known = {field.name for field in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        # JSON has lists for tuples, and a record of another version may have other fields.
        return cls(**{**kept, "late": tuple(kept.get("late", ()))})

    @property
    def where(self) -> str:
        """ "rank 3 on host9 (phase step, step 17)"."""
        return f"rank {self.rank} on {self.host} ({Position(self.phase, self.step)})"


def lost_peer(text: str) -> bool:
    """Whether an error message says that a peer has exited."""
    return LOST_PEER.search(text) is not None


def describe_failure(error: BaseException, environment: RankEnvironment, position: Position) -> Failure:
    """The record of an exception on this rank, now."""
    message = str(error)
    return Failure(
        rank=environment.rank,
        host=environment.host,
        phase=position.phase,
        step=position.step,
        exception=type(error).__name__,
        message=message,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        exit_code=exit_code_of(error),
        expected=isinstance(error, MtError),
        followed=_is_communication(error) and lost_peer(message),
    )


def _is_communication(error: BaseException) -> bool:
    """gloo raises RuntimeError itself; the store and NCCL raise subclasses of it."""
    # An ordinary error whose text happens to contain such words is not counted as a lost peer.
    return isinstance(error, RuntimeError) and not isinstance(error, MtError)


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, MtError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def write_failure(failure: Failure, folder: Path | None) -> None:
    """Write atomically. If the disk is not writable, print a note: it must not hide the failure itself."""
    if folder is None:
        return
    path = failure_path(folder, failure.rank)
    # The process may be killed while it writes: rename makes the record complete or absent.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(failure.to_json() + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        # Not through sys.stderr, whose lock another thread may hold.
        os.write(2, f"rank {failure.rank}: {path} cannot be written: {error}\n".encode())


def failure_path(folder: Path, rank: int) -> Path:
    return folder / ERRORS / f"rank-{rank}.json"


def read_failures(folder: Path, ranks: Iterable[int]) -> dict[int, Failure]:
    """The records of the ranks that left one."""
    found = {}
    for rank in ranks:
        try:
            found[rank] = Failure.from_json(failure_path(folder, rank).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, TypeError):  # no record, or one of another version
            continue
    return found


def forget_failure(folder: Path | None, rank: int) -> None:
    """Remove the record of an earlier attempt."""
    if folder is not None:
        failure_path(folder, rank).unlink(missing_ok=True)
