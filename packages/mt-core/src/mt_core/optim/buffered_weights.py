"""Main weights of ranks that share the work of data parallelism: buckets of gradients, reduced while backward runs.

Bytes a parameter, with d ranks sharing the optimizer's state (Adam's two moments included):

| number format | whole on each rank | divided over d |
| --- | --- | --- |
| fp32 | 16 | 8 + 8/d |
| bf16, gradients in fp32 | 18 | 6 + 12/d |
| fp16, gradients in fp16 | 20 | 4 + 16/d |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.nn.boxes import Box, boxes_of_run
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.nn.main_gradients import call_after_gradient, give_main_gradient
from mt_core.nn.stage import NumberedLayers
from mt_core.optim.buckets import Bucket, ReplicaAxes, Slot
from mt_core.optim.gradients import SHARDS
from mt_core.optim.main_weights import WholeWeights, trained_parameters
from mt_core.parallel.context import AxisName, ParallelContext


@dataclass(frozen=True)
class BufferOptions:
    """divided: ranks share the optimizer's state. bucket_elements: least size of a bucket that is closed.

    overlap_reduce: a bucket is reduced as soon as backward has filled it. overlap_gather: updated weights are
    collected while the next forward pass runs.
    """

    divided: bool = False
    bucket_elements: int = 40_000_000
    overlap_reduce: bool = True
    overlap_gather: bool = False
    accumulate_in_fp32: bool = True
    reduce_in_bf16: bool = False


class BufferedWeights(WholeWeights):
    """A `MainWeights` over buckets. Collective: all ranks with the same model part make it and call it alike.

    The named parameters are the pieces that this rank updates: whole tensors, or 1-D runs of elements when the
    state is divided; in fp32, views of the model's own memory. alone: names that get a bucket each, so that ranks
    with another rest of the model (other pipeline stages) divide them alike.
    """

    def __init__(
        self, model: nn.Module, ctx: ParallelContext, options: BufferOptions, alone: Collection[str] = ()
    ) -> None:
        super().__init__(model)
        self.options = options
        layouts = parameter_layouts(model)
        self.buckets = list(build_buckets(model, layouts, ctx, options, alone))
        self._piece_of: dict[str, Piece] = {}
        for bucket in self.buckets:
            for piece in make_pieces(bucket):
                self._piece_of[piece.slot.name] = piece
        self._names = [name for name, _ in trained_parameters(model)]
        self._passes = self._next_bucket = 0
        self._waiting: dict[int, int] = {}
        self._outside: list[Bucket] = []
        """Buckets with weights outside of layers, where updated weights are collected late."""
        self._hooked = [
            call_after_gradient(slot.parameter, self._accumulate(number, slot))
            for number, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        ]
        if options.accumulate_in_fp32:
            for bucket in self.buckets:
                for slot in bucket.slots:
                    give_main_gradient(slot.parameter, bucket.gradient(slot))
        if options.overlap_gather:
            self._wait_before_layers()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of each parameter the piece of this rank, which may be empty: every rank has all names."""
        return ((name, self._piece_of[name].main) for name in self._names)

    # -- a step ---------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.zero_()
            for slot in bucket.slots:
                if bucket.gradients.dtype == bucket.weights.dtype:
                    # The backward pass adds to what it finds here.
                    slot.parameter.grad = bucket.gradient(slot)

    def expect(self, passes: int) -> None:
        """The step will have so many backward passes; after the last one through a bucket, it is reduced."""
        for bucket in self._outside:
            bucket.finish_gather()
        self._passes, self._next_bucket = passes, 0
        self._waiting = {number: passes * len(bucket.slots) for number, bucket in enumerate(self.buckets)}

    def reduce(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._collect(bucket, slot)
            bucket.finish_reduce()
        for piece in self._piece_of.values():
            piece.take_gradient()

    @torch.no_grad()
    def publish(self) -> None:
        for piece in self._piece_of.values():
            piece.publish()
        for bucket in self.buckets:
            bucket.start_gather()
        if not self.options.overlap_gather:
            self.finish_gather()

    def finish_gather(self) -> None:
        for bucket in self.buckets:
            bucket.finish_gather()

    @torch.no_grad()
    def refresh(self) -> None:
        for piece in self._piece_of.values():
            piece.refresh()

    # -- whole tensors --------------------------------------------------------------------------

    def whole(self, name: str, part: Tensor | None) -> Tensor:
        """From each rank's piece of a state (None where a rank has no element) the local tensor. Collective."""
        return self._piece_of[name].whole(part)

    def part(self, name: str, local: Tensor) -> Tensor:
        return self._piece_of[name].cut(local)

    def held(self, name: str) -> list[Box]:
        return self._piece_of[name].boxes()

    # -- hooks ----------------------------------------------------------------------------------

    def _accumulate(self, number: int, slot: Slot) -> Callable[[], None]:
        bucket = self.buckets[number]

        def accumulate() -> None:
            self._collect(bucket, slot)
            if not self.options.overlap_reduce or not self._passes:
                return
            self._waiting[number] -= 1
            # In one order on all ranks, whichever bucket is full first.
            while self._next_bucket < len(self.buckets) and self._waiting[self._next_bucket] == 0:
                self.buckets[self._next_bucket].start_reduce()
                self._next_bucket += 1

        return accumulate

    @staticmethod
    def _collect(bucket: Bucket, slot: Slot) -> None:
        """A gradient of another number format, or one that autograd put elsewhere, is added to the bucket."""
        grad, target = slot.parameter.grad, bucket.gradient(slot)
        if grad is None or grad.data_ptr() == target.data_ptr():
            return
        target.add_(grad)
        slot.parameter.grad = target if grad.dtype == target.dtype else None

    def _wait_before_layers(self) -> None:
        """Numbered layers wait for their own buckets when they are called; `expect` waits for the rest, which is
        used in several ways (tied word vectors without a call of their module)."""
        bucket_of = {id(slot.parameter): bucket for bucket in self.buckets for slot in bucket.slots}
        stacks = [module for module in self.model.modules() if isinstance(module, NumberedLayers)]
        inside: set[int] = set()
        for layer in (layer for stack in stacks for layer in stack):
            ids = {id(parameter) for parameter in layer.parameters()}
            inside |= ids
            layer.register_forward_pre_hook(_waiting_for([bucket_of[i] for i in ids if i in bucket_of]))
        self._outside = [bucket for i, bucket in bucket_of.items() if i not in inside]


@dataclass(frozen=True)
class Piece:
    """The elements first ... last - 1 of a parameter, which this rank updates.

    main: fp32, what the optimizer works on; its gradient is a view of the bucket's unless formats differ.
    """

    bucket: Bucket
    slot: Slot
    first: int
    last: int
    main: nn.Parameter

    @property
    def divided(self) -> bool:
        return self.bucket.divided

    def cut(self, local: Tensor) -> Tensor:
        """This rank's elements of a tensor of the parameter's local shape."""
        return local.reshape(-1)[self.first : self.last].clone() if self.divided else local

    def boxes(self) -> list[Box]:
        """The elements of this rank, as boxes of the local tensor."""
        shape = tuple(self.slot.parameter.shape)
        return list(boxes_of_run(shape, self.first, self.last)) if self.divided else [Box.whole(shape)]

    def whole(self, part: Tensor | None) -> Tensor:
        if not self.divided or self.bucket.axes.shard.size == 1:
            assert part is not None
            return part.view_as(self.slot.parameter)
        shape = self.slot.parameter.shape
        whole = torch.zeros(shape, dtype=torch.float32, device=self.main.device)
        if part is not None:
            whole.view(-1)[self.first : self.last] = part
        # Summed as integers every rank's bits arrive as they are, the sign of a zero included.
        dist.all_reduce(whole.view(torch.int32), group=self.bucket.axes.shard.group)
        return whole

    def take_gradient(self) -> None:
        gradient = self.bucket.gradients[self.slot.start + self.first : self.slot.start + self.last]
        self.main.grad = gradient.to(self.main.dtype).view_as(self.main)

    def publish(self) -> None:
        if not self._shares_memory:
            self._weights.copy_(self.main.view(-1))

    def refresh(self) -> None:
        if not self._shares_memory:
            self.main.view(-1).copy_(self._weights)

    @property
    def _weights(self) -> Tensor:
        return self.bucket.weights[self.slot.start + self.first : self.slot.start + self.last]

    @property
    def _shares_memory(self) -> bool:
        return self.bucket.weights.dtype == torch.float32


def make_pieces(bucket: Bucket) -> Iterator[Piece]:
    """fp32 weights are updated where they are; for others one flat fp32 copy of this rank's part is made."""
    own = bucket.own
    is_fp32 = bucket.weights.dtype == torch.float32
    flat = bucket.part(bucket.weights) if is_fp32 else bucket.part(bucket.weights).float()
    for slot, first, last in bucket.pieces():
        begin = slot.start + first - own.start
        run = flat[begin : begin + last - first] if last > first else flat[:0]
        shaped = run if bucket.divided else run.view_as(slot.parameter)
        yield Piece(bucket, slot, first, last, nn.Parameter(shaped))


def build_buckets(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    options: BufferOptions,
    alone: Collection[str],
) -> Iterator[Bucket]:
    """Buckets in the order in which backward fills them: about that of the parameters, from the last to the first."""
    groups: dict[tuple[AxisName, torch.dtype, str], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(list(trained_parameters(model))):
        key = (layouts[name].replicas, parameter.dtype, name if name in alone else "")
        groups.setdefault(key, []).append((name, parameter))
    for (replicas, dtype, _), named in groups.items():
        shard, instances = SHARDS[replicas]
        axes = ReplicaAxes(ctx.axis(shard), ctx.axis(instances))
        gradient_dtype = torch.float32 if options.accumulate_in_fp32 else dtype
        reduce_dtype = torch.bfloat16 if options.reduce_in_bf16 else gradient_dtype
        for run in _runs(named, options.bucket_elements):
            yield Bucket(run, axes, gradient_dtype=gradient_dtype, reduce_dtype=reduce_dtype, divided=options.divided)


def _runs(named: list[tuple[str, nn.Parameter]], elements: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters, until there are at least so many elements."""
    run: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        run.append((name, parameter))
        size += parameter.numel()
        if size >= elements:
            yield run
            run, size = [], 0
    if run:
        yield run


def _waiting_for(buckets: list[Bucket]) -> Callable[[nn.Module, object], None]:
    unique = list({id(bucket): bucket for bucket in buckets}.values())

    def wait(module: nn.Module, inputs: object) -> None:
        for bucket in unique:
            bucket.finish_gather()

    return wait
