"""Weights and gradients of many parameters in a few flat tensors, so that few collectives are needed.

A bucket holds the parameters of one replica axis (the ranks with the same weights) and one dtype:

    slots       | embedding | layer 0 qkv | layer 0 proj | ... | padding |
    shards      |   rank 0   |   rank 1   |   rank 2   |     rank 3      |   when the optimizer state is sharded

A shard may begin and end anywhere in a parameter. A rank's optimizer updates the parts of parameters in its shard
(Rajbhandari et al., ZeRO, 2020, stage 1; Megatron's distributed optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.nn.model import NumberedLayers
from mt_core.parallel.context import SINGLE, Axis
from mt_core.parallel.reductions import start_all_reduce_, start_reduce_scatter_into

ALIGNMENT = 64
"""In elements. Every parameter and every rank's shard starts at a multiple of it, so that kernels can use vectorized
loads of whatever part of a parameter a rank has."""


@dataclass(frozen=True)
class ShardAndReplicateAxes:
    """HSDP axes of the ranks with the same weights: `shard` shards the optimizer state, `replicate` replicates it."""

    shard: Axis = SINGLE
    replicate: Axis = SINGLE


@dataclass(frozen=True)
class Slot:
    """Position of a parameter in its bucket: elements start ... stop - 1."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


class Bucket:
    """Flat weights and gradients of some parameters, which become views of them.

    weights, gradients: [size], in the parameters' dtype and in `gradient_dtype`. sharded: each rank of the
    shard axis updates only its part.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        axes: ShardAndReplicateAxes,
        *,
        gradient_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        sharded: bool,
        pool: torch.cuda.MemPool | None = None,
    ) -> None:
        self.pool = pool
        """Pool of the memory, kept for as long as the tensors are."""
        self.axes, self.sharded, self.reduce_dtype = axes, sharded, reduce_dtype
        self.slots = list(_place(named))
        first = named[0][1]
        # reduce_scatter and all_gather need equal shards. The padding is zero and stays so: it has no gradient and no
        # slot.
        self.size = _round_up(self.slots[-1].stop, axes.shard.size * ALIGNMENT if sharded else 1)
        self.weights = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(self.size, dtype=gradient_dtype, device=first.device)
        for slot in self.slots:
            weight = self.weights[slot.start : slot.stop].view_as(slot.parameter)
            weight.copy_(slot.parameter.detach())
            # The old memory is freed with each parameter, so no second copy of the whole model exists.
            slot.parameter.data = weight
        self._reducing: dist.Work | None = None
        self._sent: Tensor | None = None
        """The operand of the collective in flight: the gradients, or a copy of them in `reduce_dtype`."""
        self._gathering: dist.Work | None = None
        # True from the start of a step's reduction to its end.
        self._reduced = False

    @property
    def own(self) -> range:
        """The elements that this rank's optimizer updates."""
        if not self.sharded:
            return range(self.size)
        # Exact: the size was rounded up to a multiple.
        share = self.size // self.axes.shard.size
        return range(self.axes.shard.rank * share, (self.axes.shard.rank + 1) * share)

    def part(self, flat: Tensor) -> Tensor:
        return flat[self.own.start : self.own.stop]

    def owned_ranges(self) -> Iterator[tuple[Slot, int, int]]:
        """(slot, first, last + 1): for each parameter the range of its elements in this rank's shard, may be empty."""
        for slot in self.slots:
            start, stop = max(slot.start, self.own.start), min(slot.stop, self.own.stop)
            # max: a parameter outside of the shard gives an empty range, not a negative one.
            yield slot, start - slot.start, max(stop, start) - slot.start

    # -- gradients ------------------------------------------------------------------------------

    def gradient(self, slot: Slot) -> Tensor:
        """A parameter's part of the gradients, in its shape."""
        return self.gradients[slot.start : slot.stop].view_as(slot.parameter)

    def start_reduce(self) -> None:
        """Start the reduction of the gradients over the shard axis. Collective, once per step."""
        assert not self._reduced
        self._reduced = True
        shard = self.axes.shard
        if shard.size == 1 and self.axes.replicate.size == 1:
            return
        same = self.reduce_dtype == self.gradients.dtype
        # With another dtype a copy is sent, which lives until the reduction has ended.
        flat = self._sent = self.gradients if same else self.gradients.to(self.reduce_dtype)
        if self.sharded and shard.size > 1:
            # In place: the output is this rank's part of the input, which NCCL and gloo allow. The other parts are left
            # with unreduced values and are not read.
            self._reducing = start_reduce_scatter_into(self.part(flat), flat, shard)
        elif shard.size > 1:
            self._reducing = start_all_reduce_(flat, shard)

    def start_replicate_reduce(self) -> None:
        """Wait for the reduction over the shard axis and start the all-reduce over the replicas, if there are several.

        Collective. Called after the reduction of the next bucket was started, so that the wait is short.
        """
        replicate = self.axes.replicate
        # _sent is None in the second call, that of finish_reduce() for a bucket which _start_next() has served.
        if replicate.size > 1 and self._sent is not None:
            self._finish()
            # Of this rank's part, which is 1 / shard.size of the bucket where the state is sharded, and in the dtype of
            # the gradients.
            self._reducing = start_all_reduce_(self.part(self.gradients), replicate)

    def finish_reduce(self) -> None:
        """Wait for the reductions. Afterwards the gradients of this rank's shard are those of the global batch."""
        if not self._reduced:
            self.start_reduce()
        self.start_replicate_reduce()
        self._finish()
        self._reduced = False

    def _finish(self) -> None:
        """Wait for the collective in flight."""
        if self._reducing is not None:
            self._reducing.wait()
        # The sum in `reduce_dtype` replaces the gradients of this rank's part.
        if self._sent is not None and self._sent is not self.gradients:
            self.part(self.gradients).copy_(self.part(self._sent))
        self._reducing = self._sent = None

    # -- weights --------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start the all-gather of the updated weights. Collective."""
        if self.sharded and self.axes.shard.size > 1:
            self._gathering = self.launch_gather()

    def launch_gather(self) -> dist.Work | None:
        part = self.part(self.weights)
        # In place as well: the input is this rank's part of the output.
        return dist.all_gather_into_tensor(self.weights, part, group=self.axes.shard.group, async_op=True)

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


# -- order of the all-gathers of updated weights, overlapped with the next forward pass -------------------
#
# They are launched in the order of use.
#
#     parameters     before the layers | layer 0 | layer 1 | ... | after the layers
#     launched       first ------------------------------------------------> last
#     waited for     before the pass   | when the layer is called | when their module is called, or after the last layer
#
# A communicator runs its collectives in launch order, so waiting for a bucket also waits for all buckets launched
# before it.


class GatherOrder:
    """Hooks on the modules of a model that wait for the buckets of their weights."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        # Models register modules in the order of use, so the order of parameters stands for it.
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        self.in_order_of_use = sorted(buckets, key=lambda bucket: min(places[id(s.parameter)] for s in bucket.slots))
        self._bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
        # A stack may be empty on a pipeline stage without layers.
        stacks = [module for module in model.modules() if isinstance(module, NumberedLayers) and [*module.parameters()]]
        inside = {id(parameter) for stack in stacks for parameter in stack.parameters()}
        outside = [id(parameter) for parameter in model.parameters() if id(parameter) not in inside]
        for layer in (layer for stack in stacks for layer in stack):
            layer.register_forward_pre_hook(_waiting(self._buckets(map(id, layer.parameters()))))
        self._wait_in_modules(model, set(outside))
        self.first = self._wait_after_stacks(stacks, outside, places)

    def finish_first(self) -> None:
        """Wait for the weights that are used before any layer."""
        for bucket in self.first:
            bucket.finish_gather()

    def _wait_in_modules(self, model: nn.Module, outside: set[int]) -> None:
        """Modules outside of layers wait for their own weights when they are called."""
        for module in model.modules():
            ids = [id(parameter) for parameter in module.parameters(recurse=False)]
            if buckets := self._buckets(i for i in ids if i in outside):
                module.register_forward_pre_hook(_waiting(buckets))

    def _wait_after_stacks(
        self, stacks: Sequence[NumberedLayers], outside: Sequence[int], places: Mapping[int, int]
    ) -> list[Bucket]:
        """Weights may be used without a call of their module (the LM head, by a loss on hidden states): wait for them
        after the last layer before them. Returns the buckets of those that no layer precedes."""
        after: dict[int | None, list[int]] = {}
        starts = [min(places[id(parameter)] for parameter in stack.parameters()) for stack in stacks]
        for parameter in outside:
            # Numbers of the stacks that start before this parameter; an encoder-decoder model has several.
            before = [number for number, start in enumerate(starts) if start < places[parameter]]
            after.setdefault(before[-1] if before else None, []).append(parameter)
        for number, parameters in after.items():
            if number is not None:
                # A hook after the last layer: the wait then overlaps with the computation of all layers.
                last = list(stacks[number])[-1]
                last.register_forward_hook(_waiting(self._buckets(parameters)))
        return self._buckets(after.get(None, []))

    def _buckets(self, parameters: Iterable[int]) -> list[Bucket]:
        buckets = [self._bucket_of[i] for i in parameters if i in self._bucket_of]
        # A bucket holds several parameters of a module. Order is kept, so that waits follow the launches.
        return list({id(bucket): bucket for bucket in buckets}.values())


def _waiting(buckets: Sequence[Bucket]) -> Callable[..., None]:
    # Takes the arguments of forward pre-hooks and of forward hooks alike. finish_gather() does nothing the second time.
    def wait(*called: object) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait
