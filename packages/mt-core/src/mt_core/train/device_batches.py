"""A step's micro-batches as tensors on the device, copied there while the step before is computed.

On a GPU the copies run on a stream of their own, from pinned memory. The stream that computes waits for them on the
device; the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.data.loader import RankBatch
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.context import Axis
from mt_core.parallel.context_parallel import shard_sequence
from mt_core.train.step import Batch

FIRST_SAMPLE = "first_sample"
"""Of a micro-batch, beside the data set's own fields: the number of its first sample, on the CPU."""


@dataclass(frozen=True)
class Copied:
    """arrived: recorded behind the copies, on their stream."""

    rank_batch: RankBatch
    batches: list[Batch]
    arrived: torch.cuda.Event


class DeviceBatches:
    """cp: the axis of ranks that share sequences, of which each has its own tokens."""

    def __init__(self, device: torch.device, cp: Axis) -> None:
        self.device, self.cp = device, cp
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_the_way: list[Copied] = []

    def ahead(self, rank_batches: Iterable[RankBatch]) -> Iterator[RankBatch]:
        """The same batches; when one is given out, the copy of the next has begun."""
        if self._stream is None:
            yield from rank_batches
            return
        current = None
        for following in rank_batches:
            self._start(following, self._stream)
            if current is not None:
                yield current
            current = following
        if current is not None:
            yield current

    def take(self, rank_batch: RankBatch) -> list[Batch]:
        """For use on the current stream. A batch that is not on the way is copied there and then."""
        if self._stream is None:
            return micro_batches(rank_batch, self.cp)
        if not any(copied.rank_batch is rank_batch for copied in self._on_the_way):
            self._start(rank_batch, self._stream)
        found = next(copied for copied in self._on_the_way if copied.rank_batch is rank_batch)
        self._on_the_way = [copied for copied in self._on_the_way if copied is not found]
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(found.arrived)
        for batch in found.batches:
            for tensor in batch.values():
                if tensor.device.type == "cuda":
                    tensor.record_stream(computing)  # else its memory is given away when the copies are done with it
        return found.batches

    def _start(self, rank_batch: RankBatch, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            batches = [self._to_device(batch) for batch in micro_batches(rank_batch, self.cp)]
            self._on_the_way.append(Copied(rank_batch, batches, stream.record_event()))

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor if name == FIRST_SAMPLE else self._copy(tensor) for name, tensor in batch.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        # From memory that is not pinned the copy would be waited for.
        return tensor.pin_memory().to(self.device, non_blocking=True)


def micro_batches(rank_batch: RankBatch, cp: Axis) -> list[Batch]:
    """Tensors on the CPU, of this rank's tokens alone where ranks share a sequence."""
    batches: list[Batch] = []
    for arrays, samples in zip(rank_batch.micro_batches, rank_batch.samples, strict=True):
        own = {name: shard_sequence(torch.from_numpy(array), SEQUENCE_DIM, cp) for name, array in arrays.items()}
        batches.append({**own, FIRST_SAMPLE: torch.tensor(samples.start)})
    return batches
