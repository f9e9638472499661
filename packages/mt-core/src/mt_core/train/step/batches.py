"""A step's micro-batches: read or received from the rank that reads, and copied to the device during the previous step.

On a GPU the copies run on a side stream, from pinned memory. The compute stream waits for them by an event; the host
does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.data.loader import Arrays, RankBatch
from mt_core.data.loss_weights import LossNormalization
from mt_core.nn.context_parallel.zigzag import shard_sequence
from mt_core.nn.dropout import SAMPLE
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.context import Axis
from mt_core.parallel.first_rank import on_first_rank
from mt_core.train.step.forward_backward import Batch

FIRST_SAMPLE = "first_sample"
"""Field added to the data set's fields of a micro-batch: the index of its first sample, on the CPU."""


@dataclass(frozen=True)
class Copied:
    """arrived: event recorded after the copies, on their stream."""

    rank_batch: RankBatch
    batches: list[Batch]
    arrived: torch.cuda.Event


class DeviceBatches:
    """cp: the context-parallel axis; each rank gets its own tokens of every sequence. normalization: of the loss, which
    gives each position its weight."""

    def __init__(self, device: torch.device, cp: Axis, normalization: LossNormalization | None = None) -> None:
        self.device, self.cp = device, cp
        self.normalization = normalization or LossNormalization()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # At most two batches: the one that is computed next and the one after it.
        self._on_the_way: list[Copied] = []

    def ahead(self, rank_batches: Iterable[RankBatch]) -> Iterator[RankBatch]:
        """The same batches. When one is yielded, the copy of the next has been started."""
        if self._stream is None:
            yield from rank_batches
            return
        current = None
        # The copy of a batch starts before the step of the batch ahead of it is launched.
        for following in rank_batches:
            self._start(following, self._stream)
            if current is not None:
                yield current
            current = following
        if current is not None:
            yield current

    def take(self, rank_batch: RankBatch) -> list[Batch]:
        """The batch for use on the current stream. A batch that was not prefetched is copied now."""
        if self._stream is None:
            return micro_batches(rank_batch, self.cp, self.normalization)
        # Identity and not equality: batches hold arrays, whose == is no bool.
        if not any(copied.rank_batch is rank_batch for copied in self._on_the_way):
            self._start(rank_batch, self._stream)
        device_batch = next(copied for copied in self._on_the_way if copied.rank_batch is rank_batch)
        self._on_the_way = [copied for copied in self._on_the_way if copied is not device_batch]
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(device_batch.arrived)
        for batch in device_batch.batches:
            for tensor in batch.values():
                if tensor.device.type == "cuda":
                    tensor.record_stream(computing)  # else its memory is given away when the copies are done with it
        return device_batch.batches

    def _start(self, rank_batch: RankBatch, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            batches = [self._to_device(batch) for batch in micro_batches(rank_batch, self.cp, self.normalization)]
            self._on_the_way.append(Copied(rank_batch, batches, stream.record_event()))

    def _to_device(self, batch: Batch) -> Batch:
        # FIRST_SAMPLE stays on the CPU: begin_micro_batch() reads it on the host.
        return {name: tensor if name == FIRST_SAMPLE else self._copy(tensor) for name, tensor in batch.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        # A copy from pageable memory is synchronous.
        return tensor.pin_memory().to(self.device, non_blocking=True)


def micro_batches(rank_batch: RankBatch, cp: Axis, normalization: LossNormalization) -> list[Batch]:
    """Tensors on the CPU; with context parallelism only this rank's tokens."""
    batches: list[Batch] = []
    # Weights before the sequence is cut: that of a position may depend on its whole sequence.
    weighed = [normalization.weigh(arrays) for arrays in rank_batch.micro_batches]
    for arrays, samples in zip(weighed, rank_batch.samples, strict=True):
        # Positions are added before the sequence is cut.
        whole = arrays if cp.size == 1 else with_positions(arrays)
        tensors = {name: torch.from_numpy(array) for name, array in whole.items()}
        local_tensors = {name: own_positions(tensor, cp) for name, tensor in tensors.items()}
        batches.append({**local_tensors, FIRST_SAMPLE: torch.tensor(samples.start)})
    return batches


def own_positions(x: Tensor, cp: Axis) -> Tensor:
    """This rank's part of a field with a value for each token, [B, S]; others, such as images, stay whole."""
    return shard_sequence(x, SEQUENCE_DIM, cp) if x.ndim == 2 else x


def with_positions(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """With position_ids, 0 ... where there are none: a rank's part of a sequence does not show where it stands."""
    tokens = arrays.get("tokens")
    if tokens is None or "position_ids" in arrays:
        return arrays
    rows, length = tokens.shape
    return {**arrays, "position_ids": np.tile(np.arange(length), (rows, 1))}


def begin_micro_batch(batch: Batch) -> None:
    """Dropout is seeded by the index of the micro-batch's first sample, so masks do not depend on the layout."""
    SAMPLE.set(int(batch[FIRST_SAMPLE]))


# -- one reader for each group of ranks that take the same samples -----------------------------------
#
# The ranks of a tensor- or pipeline-parallel group may each read the data set, which multiplies the reads, or the first
# rank reads and broadcasts, which costs a few integers per token. Both give the same arrays.

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
