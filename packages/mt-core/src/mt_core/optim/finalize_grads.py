"""Gradient reduction and norm over the model-parallel axes: partial gradients are summed, replicas counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core._torch_compat import norms
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import Axis, AxisName, ParallelContext, new_group
from mt_core.parallel.reductions import sum_gradients, sum_over

# -- weights tied over pipeline stages, such as token embeddings that are also the LM head ----------------


@dataclass(frozen=True)
class TiedWeights:
    """The tied weights of this rank. axes: name -> the pipeline ranks that hold it; the first one counts it in sums.

    The gradient of such a weight is the sum of its copies' gradients.
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)


def find_tied_weights(names: Iterable[str], ctx: ParallelContext) -> TiedWeights:
    """names: this rank's parameters. Collective over the world."""
    if ctx.pp.size == 1:
        return TiedWeights()
    local_names = list(names)
    # Names of the parameters of every pipeline rank; a name on several of them is tied.
    everyone: list[list[str] | None] = [None] * ctx.pp.size
    dist.all_gather_object(everyone, local_names, group=ctx.pp.group)
    places: dict[str, tuple[int, ...]] = {}
    for place, of_rank in enumerate(everyone):
        for name in of_rank or []:
            places[name] = (*places.get(name, ()), place)
    # Keeps the order of `places`, which is the same on all ranks of the pipeline.
    several = {name: stages for name, stages in places.items() if len(stages) > 1}
    # Sorted, since group creation is collective over the world: the order has to be the same on every rank. The keys
    # are equal on all of them, as pipelines differ in their tensor- and data-parallel ranks only.
    axes = {stages: _build_axis(stages, ctx) for stages in sorted(set(several.values()))}
    return TiedWeights({name: axes[stages] for name, stages in several.items() if ctx.pp.rank in stages})


def _build_axis(places: tuple[int, ...], ctx: ParallelContext) -> Axis:
    """The axis of the ranks at `places` of this process's pipeline; an axis of one process on other ranks."""
    if ctx.pp.rank not in places:
        new_group([dist.get_rank()])  # see new_group: every process makes one
        return Axis()
    ranks = tuple(ctx.pp.ranks[place] for place in places)
    return Axis(len(ranks), places.index(ctx.pp.rank), new_group(ranks), ranks)


Named = Iterable[tuple[str, nn.Parameter]]

OTHER_AXES: Mapping[AxisName, tuple[AxisName, ...]] = {"dp_cp": ("tp",), "edp": ("etp", "ep")}
"""Replica axis of a layout -> the other axes of a stage's grid, which replicate the tensor unless they split it."""
SHARDS: Mapping[AxisName, tuple[AxisName, AxisName]] = {
    "dp_cp": ("shard", "replicate"),
    "edp": ("expert_shard", "expert_replicate"),
}
"""Replica axis of a layout -> the axis that shards the optimizer state, and the one that replicates it."""


class GradFinalizer:
    """Finalizes gradients after the data-parallel reduction, and computes their norm.

    sharded: whether the gradients are sharded over the ranks with the same weights. over_instances: also over the
    instances that otherwise replicate the shards. Methods are collective over the world; a single process communicates
    nothing.
    """

    def __init__(
        self,
        layouts: Mapping[str, ParameterLayout],
        ctx: ParallelContext,
        copies: TiedWeights,
        *,
        sharded: bool,
        over_instances: bool = False,
    ) -> None:
        self.layouts, self.ctx, self.copies, self.sharded = layouts, ctx, copies, sharded
        self.over_instances = over_instances

    def finalize_model_grads(self, named: Named) -> None:
        """All-reduce partial gradients (sequence parallelism) and the gradients of weights tied over stages."""
        if self.ctx.world.size == 1:
            return
        # Names come in the same order on all ranks of an axis, which fixes the order of elements in the collectives.
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        partial: dict[AxisName, list[Tensor]] = {}
        for name, gradient in gradients.items():
            for axis in self.layouts[name].partial_gradient:
                partial.setdefault(axis, []).append(gradient)
        for axis, parts in partial.items():
            sum_gradients(parts, self.ctx.axis(axis))
        # One by one, since each name may have other holders.
        for shared, holders in self.copies.axes.items():
            if shared in gradients:
                sum_gradients([gradients[shared]], holders)

    def norm(self, named: Named) -> Tensor:
        """[] fp64 on the device: the 2-norm of the whole model's gradient; the same value on every rank.

        Does not synchronize with the device.
        """
        return self._norm((name, p.grad) for name, p in named if p.grad is not None)

    def params_norm(self, named: Named) -> Tensor:
        """[] fp64 on the device: the 2-norm of these parameters of the whole model, as `norm` has that of gradients.
        Parameters are sharded as their gradients are; their padding is 0."""
        return self._norm((name, p.detach()) for name, p in named)

    def _norm(self, named: Iterable[tuple[str, Tensor]]) -> Tensor:
        if self.ctx.world.size == 1:
            blocks = norms([tensor for _, tensor in named])
            if not blocks:
                return torch.zeros((), dtype=torch.float64, device=self.ctx.device)
            return torch.linalg.vector_norm(torch.stack(blocks), dtype=torch.float64)
        squares = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        counted = [tensor for name, tensor in named if self.counts(name)]
        if counted:
            # Squared and summed in fp64: the square of an fp32 norm above 1.8e19 overflows fp32.
            squares += torch.stack(norms(counted)).double().square().sum()
        return all_reduce(squares, self.ctx.world).sqrt()

    def zeros(self, named: Named) -> int:
        """Number of zeros in the whole model's gradient, without padding."""
        counted = [(name, p.grad) for name, p in named if p.grad is not None and self.counts(name)]
        count = sum(int((gradient == 0).sum()) for _, gradient in counted)
        # The rank with the first part subtracts the padding of the whole parameter, so that it is subtracted once.
        count -= sum(self._padding(name) for name, _ in counted if self._has_first_part(name))
        (total,) = sum_over([float(count)], self.ctx.world, self.ctx.device)
        return int(total)

    def _padding(self, name: str) -> int:
        """Number of padding elements in a parameter; their gradient is 0."""
        layout = self.layouts.get(name)
        if layout is None:
            return 0
        # Padded size less true size.
        return math.prod(layout.padded.get(dim, n) for dim, n in enumerate(layout.shape)) - math.prod(layout.shape)

    def _has_first_part(self, name: str) -> bool:
        """Whether this rank is the first of those that a gradient is sharded over."""
        layout = self.layouts[name]
        shard, replicate = (self.ctx.axis(axis) for axis in SHARDS[layout.replicas])
        parts = [self.ctx.axis(split.axis) for split in layout.splits]
        parts += [shard] if self.sharded else []
        parts += [replicate] if self.over_instances else []
        return all(axis.rank == 0 for axis in parts)

    def counts(self, name: str) -> bool:
        """Whether this rank is the one replica that counts this gradient in sums."""
        layout = self.layouts[name]
        dividing = {split.axis for split in layout.splits}
        # On an axis that does not split it, the tensor is replicated: its ranks other than 0 do not count it.
        copies: list[Axis] = [self.ctx.axis(axis) for axis in OTHER_AXES[layout.replicas] if axis not in dividing]
        # Sharded gradients are partitioned over `shard`, where each rank counts its own part, and replicated over
        # `replicate`.
        if not self.over_instances:
            copies.append(self.ctx.axis(SHARDS[layout.replicas][1] if self.sharded else layout.replicas))
        if name in self.copies.axes:
            copies.append(self.copies.axes[name])
        return all(axis.rank == 0 for axis in copies)
