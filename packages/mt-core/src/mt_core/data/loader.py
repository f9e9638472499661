"""Batches of arrays from a data set that is indexed by sample.

The data set defines the order of samples. The samples of a step depend on the consumed samples alone, and those of a
data-parallel rank on its rank. Reader threads affect speed only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mt_core.errors import DataError
from mt_core.interfaces import Dataset

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RankBatch:
    """One rank's data for one step. micro_batches: arrays [micro_batch_size, ...]; samples: their indices, none for a
    micro-batch that does not count."""

    micro_batches: list[Arrays]
    samples: list[range]


def micro_batch_samples(first: int, size: int, micro_size: int, dp_rank: int, dp_size: int) -> list[range]:
    """Indices of the samples in each micro-batch of a rank.

    A step takes samples first ... first + size - 1. Each round of micro-batches takes dp_size * micro_size
    consecutive ones, of which rank r has the r-th micro_size (Megatron's order).
    """
    # first 0, size 8, micro_size 2, 2 ranks: rank 0 has 0-1 and 4-5, rank 1 has 2-3 and 6-7.
    starts = range(first + dp_rank * micro_size, first + size, dp_size * micro_size)
    return [range(start, min(start + micro_size, first + size)) for start in starts]


def collate(samples: Iterable[Mapping[str, np.ndarray]]) -> Arrays:
    """Stack samples: each array gets a leading batch dimension."""
    rows = list(samples)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def uncounted(sample: Mapping[str, np.ndarray]) -> Arrays:
    """A micro-batch of one sample that does not count, for a rank that has none while the others meet in
    collectives."""
    arrays = collate([sample])
    return {**arrays, "loss_mask": np.zeros_like(arrays.get("loss_mask", np.ones(1, dtype=np.float32)))}


def cut_rank_batch(
    arrays: Mapping[str, np.ndarray], first: int, micro_size: int, dp_rank: int, dp_size: int
) -> RankBatch:
    """A rank's own rows [rows, ...] of a step as micro-batches; first: the number of the step's first sample.

    Every data-parallel rank has as many rows. Raises DataError for arrays of different lengths, and for none.
    """
    lengths = {name: len(array) for name, array in arrays.items()}
    rows = max(lengths.values(), default=0)
    if rows == 0 or set(lengths.values()) != {rows}:
        raise DataError(f"a batch needs arrays of one length, its samples; these have {lengths}")
    cuts = [range(start, min(start + micro_size, rows)) for start in range(0, rows, micro_size)]
    # The numbers that micro_batch_samples would give these rows; rows of a round are micro_size on every rank.
    starts = [first + cut.start * dp_size + dp_rank * micro_size for cut in cuts]
    samples = [range(start, start + len(cut)) for start, cut in zip(starts, cuts, strict=True)]
    return RankBatch([{name: array[cut.start : cut.stop] for name, array in arrays.items()} for cut in cuts], samples)


class BatchReader:
    """Reads the batches of the given steps; prefetches `ahead` of them in `workers` threads (0: no prefetch)."""

    def __init__(
        self,
        dataset: Dataset,
        steps: Iterable[tuple[int, int]],
        *,
        micro_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        workers: int = 0,
        ahead: int = 2,
    ) -> None:
        self.dataset = dataset
        self.micro_size, self.dp_rank, self.dp_size = micro_size, dp_rank, dp_size
        self._steps = iter(steps)
        self._ahead = ahead
        # Threads: copies out of a memory map release the interpreter's lock, and arrays are not sent between processes.
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="mt-reader") if workers else None
        self._pending: deque[Future[RankBatch]] = deque()

    def __iter__(self) -> Generator[RankBatch, None, None]:
        try:
            if self._pool is None:
                yield from (self.read(first, size) for first, size in self._steps)
            else:
                yield from self._read_ahead(self._pool)
        finally:
            self.close()

    def read(self, first: int, size: int) -> RankBatch:
        """The batch of the step that takes samples first ... first + size - 1."""
        groups = micro_batch_samples(first, size, self.micro_size, self.dp_rank, self.dp_size)
        batches = [collate(self.dataset[index] for index in group) for group in groups]
        # Micro-batches of the rank with most: every rank has to run as many passes, as they meet in collectives.
        rounds = -(-size // (self.micro_size * self.dp_size))
        if len(groups) < rounds:  # of an evaluation that ends within a round
            batches.append(uncounted(self.dataset[first]))
            groups.append(range(first, first))
        return RankBatch(batches, groups)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, pool: ThreadPoolExecutor) -> Iterator[RankBatch]:
        while True:
            # Batches come in the order of steps, whichever thread ends first.
            while len(self._pending) < self._ahead:
                step = next(self._steps, None)
                if step is None:
                    break
                self._pending.append(pool.submit(self.read, *step))
            if not self._pending:
                return
            # An error of a reader is raised here, at its step.
            yield self._pending.popleft().result()
