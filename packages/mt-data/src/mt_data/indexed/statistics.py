"""Numbers about the lengths of sequences, exact, in memory that does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Lengths have 31 bits (int32, not negative): 15 high bits and 16 low ones. 33 bins: 0 to 32 binary digits.
LOW_BITS = 16
BINS = 33
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of sequences in tokens."""

    count: int
    total: int
    shortest: int
    longest: int
    empty: int
    percentiles: dict[int, int]
    """Percent p to the shortest length that at least p % of the sequences do not exceed."""
    histogram: list[tuple[int, int, int]]
    """(first length, last length, sequences), from the first to the last bin that is not empty; the bins are
    0, 1, 2 to 3, 4 to 7 and so on."""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


def length_statistics(
    read: Callable[[], Iterable[np.ndarray]], percentiles: Sequence[int] = PERCENTILES
) -> LengthStatistics:
    """Statistics of the lengths that `read()` yields in arrays [chunk]; it is called three times."""
    count, total, shortest, longest, bins = 0, 0, 2**31, 0, np.zeros(BINS, np.int64)
    for lengths in read():
        count += len(lengths)
        total += int(lengths.sum(dtype=np.int64))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        # frexp gives the number of binary digits: 0 for 0, 1 for 1, 2 for 2 and 3, ...
        # float64 holds every int32 exactly; float32 would round 2^24 + 1 and more, and so move lengths to the next bin.
        bins += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=BINS)
    return LengthStatistics(
        count=count,
        total=total,
        shortest=shortest if count else 0,
        longest=longest,
        empty=int(bins[0]),
        percentiles=dict(zip(percentiles, _percentiles(read, count, percentiles), strict=True)) if count else {},
        histogram=list(_filled(bins)),
    )


def _percentiles(read: Callable[[], Iterable[np.ndarray]], count: int, percentiles: Sequence[int]) -> list[int]:
    """Selection by digits of 16 bits: the high ones first, then the low ones within the high ones requested."""
    # Nearest-rank percentiles: the k-th smallest with k = ceil(count * percent / 100), from 1.
    ranks = [max(1, -(-count * percent // 100)) for percent in percentiles]
    # int64 [2^15]: sequences by the high bits of their length. Two passes with 2^15 and 2^16 counters find an exact
    # rank; one pass would need 2^31 counters or all lengths in memory.
    above = np.zeros(1 << (31 - LOW_BITS), np.int64)
    for lengths in read():
        above += np.bincount(lengths >> LOW_BITS, minlength=len(above))
    # Sequences whose high bits are at most k; the requested rank lies at the first k whose count reaches it.
    ends = np.cumsum(above)
    highs = [int(np.searchsorted(ends, rank)) for rank in ranks]
    below = {high: np.zeros(1 << LOW_BITS, np.int64) for high in highs}
    for lengths in read():
        for high, counts in below.items():
            low = lengths[lengths >> LOW_BITS == high] & ((1 << LOW_BITS) - 1)
            counts += np.bincount(low, minlength=len(counts))
    return [
        # The rank within the bucket: what lies below the bucket is subtracted.
        (high << LOW_BITS) + int(np.searchsorted(np.cumsum(below[high]), rank - (ends[high] - above[high])))
        for high, rank in zip(highs, ranks, strict=True)
    ]


def _filled(bins: np.ndarray) -> Iterator[tuple[int, int, int]]:
    used = np.flatnonzero(bins)
    for digits in range(used[0], used[-1] + 1) if len(used) else ():
        first, last = (0, 0) if digits == 0 else (1 << (digits - 1), (1 << digits) - 1)
        yield first, last, int(bins[digits])
