"""The folder `<prefix>.partial`: what a run has finished, kept until the outputs are written.

`run.json` in it says which inputs, options and tokenizer its shards were made with. A run that finds other ones
there throws the folder away and says so; it never goes on with shards that were made differently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from mt_core.errors import DataError
from mt_data.preprocess.files import try_lock, write_atomically
from mt_data.preprocess.options import Counts
from mt_data.preprocess.shards import ShardResult, done_path, shard_prefix, skipped_path

RUN_FILE = "run.json"
LOCK_FILE = "lock"
WORKERS_LOCK_FILE = "workers.lock"
"""Held, shared, by every process that writes shards."""
ORPHAN_SECONDS = 30.0
"""How long to wait for workers of a killed run to notice and end."""

Identity = Mapping[str, Any]
"""JSON values: all that decides what the shards hold."""


class PartialFolder:
    """The folder of one run, locked for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def has_run(self) -> bool:
        return (self.path / RUN_FILE).exists()

    def begin(self, identity: Identity) -> None:
        """Forget whatever is there and begin a run of this identity."""
        # run.json goes with the shards, and is written last: shards are never beside the identity of another run. The
        # lock files stay, since this process holds locks on these very inodes.
        self._clear(all_but=(LOCK_FILE, WORKERS_LOCK_FILE))
        self._write_run({"identity": identity})

    def differences(self, identity: Identity) -> list[str]:
        """Names of what the run that is there was given differently; empty when it can be gone on with."""
        try:
            recorded = self._read_run()["identity"]
        except (ValueError, KeyError):
            return [RUN_FILE]
        # Through JSON, as the recorded one went: tuples become lists there.
        wanted = json.loads(json.dumps(identity))
        # The union of keys: an entry that only one version of the program records is a difference too.
        return [name for name in {**wanted, **recorded} if wanted.get(name) != recorded.get(name)]

    def joined(self) -> tuple[Counts, int] | None:
        """(counts, number of shards) when the outputs are written and only this folder is left to remove."""
        joined = self._read_run().get("joined")
        return (Counts(**joined["counts"]), joined["shards"]) if joined else None

    def record_joined(self, counts: Counts, shards: int) -> None:
        self._write_run({**self._read_run(), "joined": {"counts": asdict(counts), "shards": shards}})

    def _read_run(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads((self.path / RUN_FILE).read_bytes()))

    def _write_run(self, run: Mapping[str, Any]) -> None:
        write_atomically(self.path / RUN_FILE, json.dumps(run, indent=1).encode())

    def result(self, name: str) -> ShardResult | None:
        """What is known of a finished shard; None when it is not finished, or its files are not as they were."""
        try:
            record = json.loads(done_path(self.path, name).read_bytes())
        except FileNotFoundError:
            return None
        sizes = record["sizes"]
        # Sizes alone: the content was synced before the record was written, and `append` checks the index when it
        # joins.
        if any(_size(self.path / file) != size for file, size in sizes.items()):
            return None
        # Its lines are part of the report of skipped lines, which could not be completed.
        if record["counts"]["skipped"] and not skipped_path(self.path, name).exists():
            return None
        job, chunk = record["order"]
        return ShardResult((job, chunk), Counts(**record["counts"]), sizes)

    def stream_length(self, job: int) -> int | None:
        """Number of chunks that a compressed file was cut into, when it was read to its end."""
        try:
            return int(json.loads(self._stream_path(job).read_bytes()))
        except FileNotFoundError:
            return None

    def record_stream_length(self, job: int, chunks: int) -> None:
        write_atomically(self._stream_path(job), json.dumps(chunks).encode())

    def _stream_path(self, job: int) -> Path:
        return self.path / f"{job:06d}.chunks.json"

    def prefix(self, name: str, key: str, level: str) -> Path:
        return shard_prefix(self.path, name, key, level)

    def remove(self) -> None:
        """Remove everything; what says that the run is joined goes last, in case this is interrupted."""
        self._clear(all_but=(RUN_FILE, LOCK_FILE, WORKERS_LOCK_FILE))
        # Killed after run.json: an empty folder with lock files, in which the next run begins anew, and refuses to
        # replace the finished outputs unless --overwrite is given.
        (self.path / RUN_FILE).unlink(missing_ok=True)
        self.remove_locks()

    def remove_locks(self) -> None:
        """Remove the lock files, and the folder if nothing else is in it."""
        for name in (WORKERS_LOCK_FILE, LOCK_FILE):
            (self.path / name).unlink(missing_ok=True)
        if not any(os.scandir(self.path)):
            self.path.rmdir()

    def _clear(self, all_but: tuple[str, ...]) -> None:
        for entry in os.scandir(self.path):
            if entry.name not in all_but:
                os.unlink(entry.path)


@contextmanager
def lock_partial_folder(path: Path) -> Iterator[PartialFolder]:
    """Make the folder if need be, and keep other runs from it. DataError when one is at work there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # "a" creates the file without truncating it; the content plays no part.
            lock = stack.enter_context(open(path / LOCK_FILE, "a"))
            if not try_lock(lock):
                raise DataError(f"another run is writing {path}; wait for it, or give another --output-prefix")
            workers = stack.enter_context(open(path / WORKERS_LOCK_FILE, "a"))
            # An exclusive lock is granted when the last shared one is gone, hence when no worker of a killed run is
            # left that could write under the names of this run's shards.
            if not try_lock(workers, wait_seconds=ORPHAN_SECONDS):
                raise DataError(f"processes of an earlier run still write to {path}; end them first")
            # Released at once, so that the workers of this run can take it shared.
            workers.close()
            yield PartialFolder(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def writing_shards(path: Path) -> Iterator[None]:
    """Held by a process of its own that writes shards: no other run begins there before it has ended."""
    with open(path / WORKERS_LOCK_FILE, "a") as lock:
        try_lock(lock, shared=True, wait_seconds=ORPHAN_SECONDS)
        yield


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
