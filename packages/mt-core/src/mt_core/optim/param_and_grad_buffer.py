"""Master weights of data-parallel ranks: buckets of gradients, reduced while backward runs.

Bytes per parameter, with the optimizer state sharded over d ranks (including Adam's two moments):

| dtype | unsharded | sharded over d |
| --- | --- | --- |
| fp32 | 16 | 8 + 8/d |
| bf16, gradients in fp32 | 18 | 6 + 12/d |
| the same with remainders | 16 | 6 + 10/d |
| fp16, gradients in fp16 | 20 | 4 + 16/d |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.nn.main_grad import MainGrad, attach_main_grad, call_after_gradient, clear_all
from mt_core.optim.buckets import Bucket, GatherOrder, ShardAndReplicateAxes, Slot
from mt_core.optim.finalize_grads import SHARDS
from mt_core.optim.master_weights import UnshardedWeights, trained_parameters
from mt_core.parallel.communicators import user_buffers
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.parallel.reductions import all_reduce_
from mt_core.tensor_slice import TensorSlice, slices_of_range


@dataclass(frozen=True)
class BufferOptions:
    """sharded: the optimizer state is sharded. bucket_elements: a bucket is closed when it has this many.

    overlap_reduce: a bucket is reduced as soon as backward has filled it. overlap_gather: updated weights are
    all-gathered while the next forward pass runs.
    """

    sharded: bool = False
    bucket_elements: int = 40_000_000
    overlap_reduce: bool = True
    overlap_gather: bool = False
    accumulate_in_fp32: bool = True
    reduce_in_bf16: bool = False
    user_buffers: bool = False
    """Memory is NCCL's, registered with the communicator of the shard axis."""
    keeps_remainders: bool = False
    """The optimizer updates the bf16 weights themselves, and keeps the other 16 bits of its shard (`FusedAdamW`)."""


class ParamAndGradBuffer(UnshardedWeights):
    """A `MasterWeights` over buckets. Collective: all ranks with the same model part construct and call it alike.

    The named parameters are the shards that this rank updates: whole tensors, or 1-D ranges of elements when the
    state is sharded; in fp32 and with remainders, views of the model's own memory. alone: names that get a bucket each,
    so that ranks which hold different other parameters (pipeline stages with tied weights) shard them alike.
    """

    def __init__(
        self, model: nn.Module, ctx: ParallelContext, options: BufferOptions, alone: Collection[str] = ()
    ) -> None:
        super().__init__(model)
        self.options = options
        layouts = parameter_layouts(model)
        self.buckets = list(build_buckets(model, layouts, ctx, options, alone))
        self._shard_of: dict[str, ParamShard] = {}
        for bucket in self.buckets:
            for shard in shard_params(bucket, options):
                self._shard_of[shard.slot.name] = shard
        # Names whose 16-bit copy the optimizer writes itself (take_copy).
        self._taken: set[str] = set()
        self._names = [name for name, _ in trained_parameters(model)]
        # _next_bucket: the first bucket whose reduction has not been started in this step.
        self._passes = self._next_bucket = 0
        # Bucket -> gradients that it still lacks, over all backward passes of the step.
        self._waiting: dict[int, int] = {}
        self._gathers = GatherOrder(model, self.buckets) if options.overlap_gather else None
        # The returned nodes are kept because their hooks are removed with them.
        self._hooked = [
            call_after_gradient(slot.parameter, self._accumulate(number, slot))
            for number, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        ]
        # Set for 16-bit weights alone: the gradient of an fp32 weight is accumulated by autograd in the bucket itself.
        self._mains: dict[str, MainGrad] = {}
        if options.accumulate_in_fp32:
            for bucket in self.buckets:
                for slot in bucket.slots:
                    main = attach_main_grad(slot.parameter, bucket.gradient(slot))
                    if main is not None:
                        self._mains[slot.name] = main

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shard of each parameter. It may be empty: every rank has all names."""
        return ((name, self._shard_of[name].main) for name in self._names)

    # -- a step ---------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for shard in self._shard_of.values():
            # A copy in fp32 of gradients in 16 bits, made for the last update, is freed before the passes.
            shard.main.grad = None
        for bucket in self.buckets:
            if mains := self._mains_of(bucket):  # all of its parameters have one dtype
                clear_all(mains)
                continue
            bucket.gradients.zero_()
            for slot in bucket.slots:
                if bucket.gradients.dtype == bucket.weights.dtype:
                    # .grad is a view of the bucket, so autograd accumulates into it in place.
                    slot.parameter.grad = bucket.gradient(slot)

    def _mains_of(self, bucket: Bucket) -> list[MainGrad]:
        return [self._mains[slot.name] for slot in bucket.slots if slot.name in self._mains]

    def expect(self, passes: int) -> None:
        """Set the number of backward passes of the step. A bucket is reduced in the last one."""
        # The first forward pass follows: what it uses before any layer hook has to be there.
        if self._gathers is not None:
            self._gathers.finish_first()
        # A parameter without a gradient in some pass leaves its bucket waiting; reduce() then starts what is left.
        self._passes, self._next_bucket = passes, 0
        self._waiting = {number: passes * len(bucket.slots) for number, bucket in enumerate(self.buckets)}

    def reduce(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._collect(bucket, slot)
        # Without overlap, all buckets; with it, those from the first that an unused parameter kept from being full. In
        # the same order on all ranks, as in accumulate().
        while self._next_bucket < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish_reduce()
        self._next_bucket = 0
        for shard in self._shard_of.values():
            shard.take_gradient()

    def take_copy(self, name: str) -> Tensor | None:
        self._taken.add(name)
        return self._shard_of[name].model_weights

    @torch.no_grad()
    def copy_to_model(self) -> None:
        for name, shard in self._shard_of.items():
            # fp32 shards are views of the bucket and copy nothing.
            if name not in self._taken:
                shard.copy_to_model()
        for bucket in self.buckets if self._gathers is None else self._gathers.in_order_of_use:
            bucket.start_gather()
        if not self.options.overlap_gather:
            self.finish_gather()

    def finish_gather(self) -> None:
        for bucket in self.buckets:
            bucket.finish_gather()

    @property
    def waited_for(self) -> Sequence[Bucket]:
        """Buckets that are waited for before the first layer of a step."""
        return self.buckets if self._gathers is None else self._gathers.first

    @torch.no_grad()
    def copy_from_model(self) -> None:
        for shard in self._shard_of.values():
            shard.copy_from_model()

    # -- whole tensors --------------------------------------------------------------------------

    def unshard(self, name: str, part: Tensor | None) -> Tensor:
        """The local tensor from all ranks' shards of a state (None where a rank has no elements). Collective."""
        return self._shard_of[name].unshard(part)

    def shard(self, name: str, local: Tensor) -> Tensor:
        return self._shard_of[name].shard(local)

    def owned_slices(self, name: str) -> list[TensorSlice]:
        return self._shard_of[name].slices()

    # -- hooks ----------------------------------------------------------------------------------

    def _accumulate(self, number: int, slot: Slot) -> Callable[[], None]:
        bucket = self.buckets[number]

        def accumulate() -> None:
            self._collect(bucket, slot)
            # 0 until expect() is called: a backward pass before any step reduces nothing.
            if not self.options.overlap_reduce or not self._passes:
                return
            self._waiting[number] -= 1
            # All ranks have to launch collectives in the same order; the order in which buckets fill may differ.
            while self._next_bucket < len(self.buckets) and self._waiting[self._next_bucket] == 0:
                self._start_next()

        return accumulate

    def _start_next(self) -> None:
        """Start the reduction of the next bucket, and that of the previous one over the replicas (HSDP)."""
        # The collective reads the memory of the bucket, which a cleared and never written main_grad leaves stale.
        for main in self._mains_of(self.buckets[self._next_bucket]):
            main.settle()
        self.buckets[self._next_bucket].start_reduce()
        # One bucket late: waiting for the reduction over the shard axis right after its start would expose it.
        if self._next_bucket > 0:
            self.buckets[self._next_bucket - 1].start_replicate_reduce()
        self._next_bucket += 1

    def _collect(self, bucket: Bucket, slot: Slot) -> None:
        """Add the gradient to the bucket, unless autograd has accumulated it there in place."""
        grad, target = slot.parameter.grad, bucket.gradient(slot)
        # The same memory: zero_grad() had set .grad to the view of the bucket.
        if grad is None or grad.data_ptr() == target.data_ptr():
            return
        if slot.name in self._mains:
            self._mains[slot.name].add(grad)
            slot.parameter.grad = None
            return
        # autograd made a new tensor, as .grad was None and not the view that zero_grad() sets.
        target.add_(grad)
        slot.parameter.grad = target if grad.dtype == target.dtype else None


@dataclass(frozen=True)
class ParamShard:
    """The elements first ... last - 1 of a parameter, which this rank updates.

    main: the fp32 master weight, or the bf16 weight that a remainder completes. Its gradient is a view of the bucket's
    if both are fp32 or the model's own memory is updated.
    """

    bucket: Bucket
    slot: Slot
    first: int
    last: int
    main: nn.Parameter

    @property
    def sharded(self) -> bool:
        return self.bucket.sharded

    def shard(self, local: Tensor) -> Tensor:
        """This rank's elements of a tensor of the parameter's local shape."""
        return local.reshape(-1)[self.first : self.last].clone() if self.sharded else local

    def slices(self) -> list[TensorSlice]:
        """The elements of this rank, as slices of the local tensor."""
        shape = tuple(self.slot.parameter.shape)
        return list(slices_of_range(shape, self.first, self.last)) if self.sharded else [TensorSlice.whole(shape)]

    def unshard(self, part: Tensor | None) -> Tensor:
        if not self.sharded or self.bucket.axes.shard.size == 1:
            assert part is not None
            return part.view_as(self.slot.parameter)
        shape = self.slot.parameter.shape
        # fp32 holds every value of a 16-bit state exactly, and its bits fit the int32 of the sum.
        whole = torch.zeros(shape, dtype=torch.float32, device=self.main.device)
        if part is not None:
            whole.view(-1)[self.first : self.last] = part
        # Each element is nonzero on one rank only. Summed as integers its bits are preserved; 0.0 + -0.0 would not be.
        all_reduce_(whole.view(torch.int32), self.bucket.axes.shard)
        return whole

    def take_gradient(self) -> None:
        # to() is the identity for fp32; with gradients accumulated in 16 bits it makes the fp32 ones that the optimizer
        # needs.
        gradient = self.bucket.gradients[self.slot.start + self.first : self.slot.start + self.last]
        self.main.grad = gradient.to(self.main.grad_dtype).view_as(self.main)

    @property
    def model_weights(self) -> Tensor | None:
        """The model's own elements; None where `main` is a view of them."""
        return None if self._shares_memory else self._weights.view_as(self.main)

    def copy_to_model(self) -> None:
        if not self._shares_memory:
            self._weights.copy_(self.main.view(-1))

    def copy_from_model(self) -> None:
        if not self._shares_memory:
            self.main.view(-1).copy_(self._weights)

    @property
    def _weights(self) -> Tensor:
        return self.bucket.weights[self.slot.start + self.first : self.slot.start + self.last]

    @property
    def _shares_memory(self) -> bool:
        return self.bucket.weights.dtype == self.main.dtype


def shard_params(bucket: Bucket, options: BufferOptions) -> Iterator[ParamShard]:
    """Weights in fp32 or with remainders are updated in place; for others one flat fp32 copy of this rank's part is
    made."""
    owned, flat = bucket.own, bucket.part(bucket.weights)
    if not options.keeps_remainders:
        flat = flat.float()
    for slot, first, last in bucket.owned_ranges():
        # Offset in this rank's part, which starts at owned.start of the bucket.
        begin = slot.start + first - owned.start
        run = flat[begin : begin + last - first] if last > first else flat[:0]
        shaped = run if bucket.sharded else run.view_as(slot.parameter)
        main = nn.Parameter(shaped)
        main.grad_dtype = bucket.gradients.dtype if options.keeps_remainders else torch.float32
        yield ParamShard(bucket, slot, first, last, main)


def build_buckets(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    options: BufferOptions,
    alone: Collection[str],
) -> Iterator[Bucket]:
    """Buckets in the order in which backward fills them: roughly that of the parameters, reversed."""
    groups: dict[tuple[AxisName, torch.dtype, str], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(list(trained_parameters(model))):
        # One bucket is one collective: of one group of ranks and one dtype.
        key = (layouts[name].replicas, parameter.dtype, name if name in alone else "")
        groups.setdefault(key, []).append((name, parameter))
    for (replicas, dtype, _), named in groups.items():
        shard, replicate = SHARDS[replicas]
        axes = ShardAndReplicateAxes(ctx.axis(shard), ctx.axis(replicate))
        gradient_dtype = torch.float32 if options.accumulate_in_fp32 else dtype
        reduce_dtype = torch.bfloat16 if options.reduce_in_bf16 else gradient_dtype
        for run in _runs(named, options.bucket_elements):
            with _memory(axes, ctx, options) as pool:
                bucket = Bucket(
                    run,
                    axes,
                    gradient_dtype=gradient_dtype,
                    reduce_dtype=reduce_dtype,
                    sharded=options.sharded,
                    pool=pool,
                )
            yield bucket


def _memory(
    axes: ShardAndReplicateAxes, ctx: ParallelContext, options: BufferOptions
) -> AbstractContextManager[torch.cuda.MemPool | None]:
    """Where a bucket is allocated."""
    group = axes.shard.group
    return user_buffers(group, ctx.device) if options.user_buffers and group is not None else nullcontext()


def _runs(named: list[tuple[str, nn.Parameter]], elements: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Runs of consecutive parameters with at least `elements` elements."""
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
