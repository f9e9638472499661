"""Weights and gradients of many parameters in a few flat tensors, so that ranks exchange them in few messages.

A bucket holds the parameters of one replica axis (the ranks with the same weights) and one number format:

    slots       | embedding | layer 0 qkv | layer 0 proj | ... | padding |
    shards      |   rank 0   |   rank 1   |   rank 2   |     rank 3      |   when the optimizer's state is divided

A shard may begin and end anywhere in a parameter; the pieces of parameters in a rank's shard are what its
optimizer updates (Rajbhandari et al., ZeRO, 2020, stage 1; Megatron's distributed optimizer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.parallel.context import SINGLE, Axis

ALIGNMENT = 64
"""Elements: every parameter begins at a multiple, so that kernels read whole words."""


@dataclass(frozen=True)
class ReplicaAxes:
    """The ranks with the same weights: `shard` of them share the optimizer's state, `instances` repeat it."""

    shard: Axis = SINGLE
    instances: Axis = SINGLE


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket: elements start ... stop - 1."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


class Bucket:
    """Flat weights and gradients of some parameters, which become views of them.

    weights, gradients: [size], in the parameters' number format and in `gradient_dtype`. divided: each rank of
    the shard axis updates only its part.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        axes: ReplicaAxes,
        *,
        gradient_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        divided: bool,
    ) -> None:
        self.axes, self.divided, self.reduce_dtype = axes, divided, reduce_dtype
        self.slots = list(_place(named))
        first = named[0][1]
        self.size = _round_up(self.slots[-1].stop, axes.shard.size if divided else 1)
        self.weights = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(self.size, dtype=gradient_dtype, device=first.device)
        for slot in self.slots:
            own = self.weights[slot.start : slot.stop].view_as(slot.parameter)
            own.copy_(slot.parameter.detach())
            slot.parameter.data = own
        self._reducing: list[tuple[dist.Work, Tensor]] = []
        self._gathering: dist.Work | None = None
        self._reduced = False

    @property
    def own(self) -> range:
        """The elements that this rank's optimizer updates."""
        if not self.divided:
            return range(self.size)
        share = self.size // self.axes.shard.size
        return range(self.axes.shard.rank * share, (self.axes.shard.rank + 1) * share)

    def part(self, flat: Tensor) -> Tensor:
        return flat[self.own.start : self.own.stop]

    def pieces(self) -> Iterator[tuple[Slot, int, int]]:
        """(slot, first, last + 1): for each parameter, which of its elements are in this rank's shard (maybe none)."""
        for slot in self.slots:
            start, stop = max(slot.start, self.own.start), min(slot.stop, self.own.stop)
            yield slot, start - slot.start, max(stop, start) - slot.start

    # -- gradients ------------------------------------------------------------------------------

    def gradient(self, slot: Slot) -> Tensor:
        """A parameter's part of the gradients, in its shape."""
        return self.gradients[slot.start : slot.stop].view_as(slot.parameter)

    def start_reduce(self) -> None:
        """Begin to sum the gradients over the replica axes. Collective, once a step."""
        assert not self._reduced
        self._reduced = True
        shard, instances = self.axes.shard, self.axes.instances
        if shard.size == 1 and instances.size == 1:
            return
        flat = self.gradients if self.reduce_dtype == self.gradients.dtype else self.gradients.to(self.reduce_dtype)
        if self.divided and shard.size > 1:
            work = dist.reduce_scatter_tensor(self.part(flat), flat, group=shard.group, async_op=True)
        else:
            work = dist.all_reduce(flat, group=shard.group, async_op=True) if shard.size > 1 else None
        if work is not None:
            self._reducing.append((work, flat))
        elif flat is not self.gradients:
            self.gradients.copy_(flat)

    def finish_reduce(self) -> None:
        """Wait for the sums; afterwards the gradients of this rank's part are those of the whole batch."""
        if not self._reduced:
            self.start_reduce()
        self._reduced = False
        for work, flat in self._reducing:
            work.wait()
            if flat is not self.gradients:
                self.part(self.gradients).copy_(self.part(flat))
        self._reducing.clear()
        if self.axes.instances.size > 1:
            dist.all_reduce(self.part(self.gradients), group=self.axes.instances.group)

    # -- weights --------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to collect the updated parts of all ranks. Collective."""
        if self.divided and self.axes.shard.size > 1:
            own = self.part(self.weights)
            self._gathering = dist.all_gather_into_tensor(self.weights, own, group=self.axes.shard.group, async_op=True)

    def finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


def _place(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Slot]:
    start = 0
    for name, parameter in named:
        yield Slot(name, parameter, start, start + parameter.numel())
        start = _round_up(start + parameter.numel(), ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
