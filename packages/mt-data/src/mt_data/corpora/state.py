"""Which outputs are finished, from which input and with which options, so that a rerun neither repeats nor mixes."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.outputs import atomic_writer
from mt_data.corpora.report import Report

FOLDER = ".state"
SAMPLED_BYTES = 2**16


def source_identity(path: Path, label: str = "") -> dict[str, Any]:
    """What distinguishes one state of an input file from another: path, size, time of change, a digest of both ends.

    Raises DataError for a file that cannot be read. label: stands before its path there, to name its option.
    """
    try:
        stat = path.stat()
        with open(path, "rb") as stream:
            # Not the whole file: corpora have terabytes. Size and time reveal most changes, the two ends some that keep
            # both.
            ends = stream.read(SAMPLED_BYTES)
            stream.seek(max(0, stat.st_size - SAMPLED_BYTES))
            ends += stream.read(SAMPLED_BYTES)
    except OSError as error:
        raise DataError(f"{label}{path} cannot be read: {error.strerror}") from error
    digest = hashlib.blake2b(ends, digest_size=16).hexdigest()
    return {"path": str(path.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ends": digest}


def sources_digest(paths: Iterable[Path], label: str = "") -> str:
    """One short text for the identities of several files, in their order."""
    identities = json.dumps([source_identity(path, label) for path in paths])
    return hashlib.blake2b(identities.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Finished:
    """What a finished output was made of. made_by: the command's options; see `Task.identity`."""

    source: dict[str, Any]
    made_by: dict[str, Any]
    outputs: dict[str, int]
    report: Report


def state_path(folder: Path, name: str) -> Path:
    return folder / FOLDER / "files" / f"{name}.json"


def save_finished(folder: Path, name: str, finished: Finished) -> None:
    value = {
        "source": finished.source,
        "made_by": finished.made_by,
        "outputs": finished.outputs,
        "report": finished.report.to_json(),
    }
    with atomic_writer(state_path(folder, name)) as stream:
        stream.write(json.dumps(value, indent=1).encode("utf-8"))


def load_finished(folder: Path, name: str) -> Finished | None:
    """The record of an output, or None where there is none; raises DataError where it cannot be read."""
    path = state_path(folder, name)
    try:
        value = json.loads(path.read_bytes())
        return Finished(value["source"], value["made_by"], value["outputs"], Report.from_json(value["report"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it, and the file it describes is made again") from error


def reusable(
    folder: Path,
    name: str,
    source: dict[str, Any],
    made_by: dict[str, Any],
    outputs: Iterable[Path],
    overwrite: bool,
) -> Report | None:
    """The report of outputs that need no work, or None when they must be made.

    Raises ConfigError when the output is there but was made otherwise, unless `overwrite`.
    """
    finished = load_finished(folder, name)
    if finished is None:
        return None
    difference = _difference(finished, source, made_by)
    if difference and not overwrite:
        raise ConfigError(
            f"{folder / name} was made with {difference}; give another --output, or --overwrite to make it again"
        )
    # Output files that were deleted or cut since are made again.
    present = all(_size(path) == finished.outputs.get(str(path), -1) for path in outputs)
    return finished.report if present and not difference else None


def _difference(finished: Finished, source: dict[str, Any], made_by: dict[str, Any]) -> str:
    """What differs, in words; "" when nothing does."""
    if finished.source != source:
        was, now = finished.source["path"], source["path"]
        return f"input {was}, not {now}" if was != now else f"an earlier content of {now}"
    # Through JSON as the stored one, which has lists for tuples.
    made_by = json.loads(json.dumps(made_by))
    for key in [*finished.made_by, *made_by]:
        was, now = finished.made_by.get(key), made_by.get(key)
        if was != now:
            return f"{key}={was!r}, now {now!r}"
    return ""


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one job; a second one raises DataError. The lock ends with the process, however it ends."""
    path = folder / FOLDER / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another job is writing to {folder}; wait for it, or give another --output") from error
        yield
