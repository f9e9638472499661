"""Failures of ranks: the record `errors/rank-N.json` in the run directory, written before any cleanup; the report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
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
    failures = {}
    for rank in ranks:
        try:
            failures[rank] = Failure.from_json(failure_path(folder, rank).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, TypeError):  # no record, or one of another version
            continue
    return failures


def forget_failure(folder: Path | None, rank: int) -> None:
    """Remove the record of an earlier attempt."""
    if folder is not None:
        failure_path(folder, rank).unlink(missing_ok=True)


# -- the report: the first failure, then the ranks that ended because of it -------------------------------


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """The cause first. Failures that followed another are sorted last: clocks of different hosts are not comparable."""
    known = {failure.rank: failure for failure in failures}
    for failure in list(known.values()):
        if failure.cause is not None:  # announced by a rank of another node, whose record may not be available here
            cause = Failure.from_dict(failure.cause)
            known.setdefault(cause.rank, cause)
    return sorted(known.values(), key=lambda failure: (failure.followed, failure.time))


def report(failures: Iterable[Failure], ended: Collection[int] = ()) -> str:
    """Text for the terminal. ended: ranks that had not failed and were ended by the launcher."""
    first, *others = in_order(failures)
    paragraphs = [f"{first.where} failed first:\n\n{_what(first)}"]
    paragraphs += [_stack(other) for other in others if other.rank in first.late and other.traceback]
    paragraphs.append("\n".join(_rest(first, others, ended)))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _what(failure: Failure) -> str:
    """The message of an MtError; any other exception with its traceback."""
    if failure.expected or not failure.traceback:
        return f"{failure.exception}: {failure.message}"
    return failure.traceback.rstrip()


def _stack(failure: Failure) -> str:
    return f"The late {failure.where} was here:\n\n{failure.traceback.rstrip()}"


def _rest(first: Failure, others: Sequence[Failure], ended: Collection[int]) -> list[str]:
    """One line for each way in which other ranks ended."""
    groups: dict[str, list[int]] = {}
    for other in others:
        groups.setdefault(_how(first, other), []).append(other.rank)
    lines = [f"{ranks(numbers)} {how}." for how, numbers in groups.items()]
    return lines + (
        [f"{ranks(ended)} had not failed and {'was' if len(ended) == 1 else 'were'} ended."] if ended else []
    )


def _how(first: Failure, other: Failure) -> str:
    if other.followed:
        return "followed"
    if (other.exception, other.message) == (first.exception, first.message):
        return "failed with the same error"
    return f"failed later with {other.exception}: {other.message.splitlines()[0] if other.message else 'no message'}"


def ranks(numbers: Collection[int]) -> str:
    """ "Rank 1", "Ranks 0, 2-5 and 9"."""
    ordered = sorted(numbers)
    spans: list[list[int]] = []
    for number in ordered:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    shown = [part for span in spans for part in _span(span)]
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"Rank{'' if len(ordered) == 1 else 's'} {text}"


def _span(span: list[int]) -> list[str]:
    return [str(number) for number in span] if len(span) < 3 else [f"{span[0]}-{span[-1]}"]


def followed_by(failure: Failure, cause: Failure, **changes: object) -> Failure:
    """The record of a rank that ended because of another's failure, which it carries along."""
    carried = dataclasses.asdict(dataclasses.replace(cause, cause=None))
    return dataclasses.replace(failure, followed=True, cause=carried, exit_code=cause.exit_code, **changes)  # type: ignore[arg-type]
