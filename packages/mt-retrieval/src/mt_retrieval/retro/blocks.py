"""Arrays in blocks, written by any number of ranks. Killed, the same call continues.

A block is complete when its file has the hash of its record, which is written last. What is in a block does not depend
on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.parallel.context import wait_for_all
from mt_data.records import Record, StoredFile, is_unchanged, read_record, require_unchanged, write_array, write_record

# -- defaults of `mt retro`: Megatron's, where it has them -------------------------------------------

SPLIT = "969, 30, 1"
CHUNK_LENGTH = 64
DOCUMENTS_OF_BLOCK = 100_000
ROWS_OF_BLOCK = 8192
"""Chunks that are embedded, or whose neighbours are found: what a killed run may lose on each rank."""
BATCH_SIZE = 128
NUM_NEIGHBORS = 20
NUM_NEIGHBORS_QUERY = 200
EXACT = "exact"


DIGITS = 5
OnProgress = Callable[[int, int], None]
"""(done by this rank, all of this rank)"""
Bars = Callable[[str], AbstractContextManager[OnProgress]]
"""A bar with a title, while something long is done."""
Compute = Callable[[int, Callable[[int], None]], NDArray[np.generic]]
"""(number of a block, called with the rows that are done) -> the block"""


@contextmanager
def no_bars(title: str) -> Iterator[OnProgress]:
    yield lambda done, total: None


@dataclass(frozen=True)
class Share:
    """The blocks of this process: every size-th from `rank` on. writes: the first of processes that share a model."""

    rank: int = 0
    size: int = 1
    writes: bool = True


@dataclass(frozen=True)
class Blocks:
    """NAME-00000.npy with its SHA-256 in NAME-00000.json, and so on. cure: what to do about a damaged one."""

    folder: Path
    name: str
    cure: str

    def is_written(self, number: int) -> bool:
        try:
            return is_unchanged(self.folder, self.record(number))
        except DataError:
            return False

    def write(self, number: int, array: NDArray[np.generic]) -> None:
        """Removes what killed runs have left of the block."""
        # Of this block only: other ranks write theirs at the same time.
        for temporary in self.folder.glob(f".{self._stem(number)}.*"):
            temporary.unlink(missing_ok=True)
        write_record(self._record_path(number), write_array(self.folder, f"{self._stem(number)}.npy", array))

    def record(self, number: int) -> StoredFile:
        return read_record(self._record_path(number), StoredFile)

    def read(self, number: int) -> NDArray[np.generic]:
        """Mapped into memory. Raises DataError for a block that is missing or damaged."""
        path = require_unchanged(self.folder, self.record(number), self.cure)
        array: NDArray[np.generic] = np.lib.format.open_memmap(path, mode="r")
        return array

    def remove(self, count: int) -> None:
        for number in range(count):
            # The record first: a file without a record is no block, a record without its file would be a damaged one.
            self._record_path(number).unlink(missing_ok=True)
            (self.folder / f"{self._stem(number)}.npy").unlink(missing_ok=True)

    def _stem(self, number: int) -> str:
        return f"{self.name}-{number:0{DIGITS}}"

    def _record_path(self, number: int) -> Path:
        return self.folder / f"{self._stem(number)}.json"


def write_blocks(
    blocks: Blocks, rows: Sequence[int], chosen: Sequence[int], compute: Compute, share: Share, on_progress: OnProgress
) -> None:
    """Writes the chosen blocks that are not there. rows: of each block, for the progress. Collective."""
    # Example, blocks 0 ... 4 on two ranks: 0 2 4 and 1 3.
    rank_blocks = chosen[share.rank :: share.size]
    done, total = 0, sum(rows[number] for number in rank_blocks)
    for number in rank_blocks:
        before = done
        # Ranks that share a model decide the same: the block is written after a collective computation, for which all
        # of them have made this check.
        if not blocks.is_written(number):
            array = compute(number, lambda count, before=before: on_progress(before + count, total))  # type: ignore[misc]
            if share.writes:
                blocks.write(number, array)
        done += rows[number]
        on_progress(done, total)
    # Callers read the blocks of other ranks next.
    wait_for_all()


def ranges(count: int, size: int) -> list[range]:
    """0 ... count in blocks of `size`, the last one shorter."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


# -- the job that a folder belongs to ----------------------------------------------------------------


def require_same_job(folder: Path, stored: Record, job: Record) -> None:
    """Raises ConfigError that names what differs from the job whose files are in the folder."""
    differences = [f"{name}: {was} there, {now} now" for name, was, now in _compared(stored, job) if was != now]
    if differences:
        raise ConfigError(f"{folder} is of another job ({'; '.join(differences)}); remove it, or give another project")


def _compared(stored: Record, job: Record) -> Iterator[tuple[str, str, str]]:
    for name in type(job).model_fields:
        yield name, _shown(getattr(stored, name)), _shown(getattr(job, name))


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# -- ranks as writers --------------------------------------------------------------------------------


def share_of_world() -> Share:
    """Where each process computes on its own."""
    return Share(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Share()
