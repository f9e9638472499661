"""Which records fit into samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordSizes:
    """positions int64 [records]. where: record -> its file and line. noun, takes: for messages."""

    positions: NDArray[np.int64]
    where: Callable[[int], str]
    noun: str = "record"
    takes: str = "takes"


def fitting_records(sizes: RecordSizes, within: range, length: int, on_too_long: str, name: str) -> NDArray[np.int64]:
    """Numbers of the records that fit into `length` positions. Raises DataError for none, and for a longer one with
    on_too_long="error"."""
    numbers = np.arange(within.start, within.stop, dtype=np.int64)
    too_long = sizes.positions[numbers] > length
    if too_long.any():
        first = int(numbers[too_long.argmax()])
        what = f"{sizes.where(first)}: {sizes.takes} {int(sizes.positions[first])} positions, data.seq_length={length}"
        if on_too_long == "error":
            raise DataError(f'{what}; make it larger, or leave such {sizes.noun}s out with data.on_too_long="drop"')
        log.warning("%ss left out: %d of %d; the first is %s", sizes.noun, too_long.sum(), len(numbers), what)
    if too_long.all():
        raise DataError(f"{name}: no {sizes.noun} fits into data.seq_length={length} positions; make it larger")
    return numbers[~too_long]
