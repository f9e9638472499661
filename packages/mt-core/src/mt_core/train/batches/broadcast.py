"""One rank reads the batches and broadcasts them to the ranks that hold the same model: they take the same samples.

The ranks of a tensor- or pipeline-parallel group may each read the data set, which multiplies the reads, or the first
rank reads and broadcasts, which costs a few integers per token. Both give the same arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from mt_core.data.loader import Arrays, RankBatch
from mt_core.parallel.context import Axis
from mt_core.parallel.first_rank import on_first_rank

Header = list[dict[str, tuple[str, tuple[int, ...]]]]
"""For each micro-batch: name -> (dtype, shape)."""


def broadcast_batches(batches: Iterator[RankBatch] | None, axis: Axis) -> Iterator[RankBatch]:
    """The first rank's batches, on every rank of the axis; other ranks pass None. Collective for each batch.

    An error of the first rank's iterator is raised on every rank.
    """
    batch: RankBatch | None = None

    def read_header() -> tuple[Header, list[range]] | None:
        nonlocal batch
        batch = next(batches, None) if batches is not None else None
        return _header(batch)

    while True:
        # Only the first rank has an iterator; the others wait for the header.
        shared = on_first_rank(read_header, axis)
        if shared is None:
            return
        header, samples = shared
        yield RankBatch([_broadcast_arrays(batch, index, shape, axis) for index, shape in enumerate(header)], samples)


def _header(batch: RankBatch | None) -> tuple[Header, list[range]] | None:
    """Dtypes and shapes of a batch, and its samples; None when the iterator is exhausted."""
    if batch is None:
        return None
    shapes = [{name: (str(x.dtype), x.shape) for name, x in arrays.items()} for arrays in batch.micro_batches]
    return shapes, batch.samples


def _broadcast_arrays(
    batch: RankBatch | None, index: int, shapes: dict[str, tuple[str, tuple[int, ...]]], axis: Axis
) -> Arrays:
    arrays = {}
    for name, (dtype, shape) in shapes.items():
        # torch.from_numpy shares the array's memory, so the broadcast fills it in place.
        array = np.ascontiguousarray(batch.micro_batches[index][name]) if batch else np.empty(shape, dtype)
        dist.broadcast(torch.from_numpy(array), src=axis.ranks[0], group=axis.group)
        arrays[name] = array
    return arrays
