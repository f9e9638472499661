"""Rows as batches: the part of this data-parallel rank, filled up to one width, and the rows of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from mt_core.data.loader import RankBatch, cut_rank_batch
from mt_core.train.batch_source import TrainingRun
from mt_tune.rl.rows import Row, stacked

T = TypeVar("T")
WIDTH_UNIT = 8
"""Rows are filled up to a multiple of it, and of what the layout divides sequences by."""


def rank_batch(run: TrainingRun, rows: Sequence[Row]) -> RankBatch:
    """This rank's part of a step on these rows, which are those of all data-parallel ranks."""
    dp = run.ctx.dp
    arrays = stacked(of_rank(rows, dp.rank, dp.size), width_of(run, rows))
    return cut_rank_batch(arrays, run.state.consumed_samples, run.config.train.micro_batch_size, dp.rank, dp.size)


def width_of(run: TrainingRun, rows: Iterable[Row]) -> int:
    """Positions of the longest row, rounded up; the same for all batches where graphs are recorded."""
    if run.config.train.cuda_graphs != "none":
        return run.config.data.seq_length
    unit = int(np.lcm.reduce([WIDTH_UNIT, 2 * run.ctx.cp.size * run.ctx.tp.size]))
    return -(-max(row.positions for row in rows) // unit) * unit


def of_rank(rows: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """An equal part for each data-parallel rank, in order, so that whole groups stay together where they fit."""
    size = len(rows) // ranks
    return rows[rank * size : (rank + 1) * size]


def planned_steps(sizes: Sequence[int], rows: int) -> list[list[int]]:
    """Numbers of the rows of each step: in order, and from the first one again behind the last."""
    ends = np.cumsum(sizes).tolist()
    return [[number % rows for number in range(end - size, end)] for end, size in zip(ends, sizes, strict=True)]
