"""Gradient reduction and norm over the model-parallel axes: partial gradients are summed, replicas counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mt_core._torch_compat import norms
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import Axis, AxisName, ParallelContext
from mt_core.parallel.data import sum_gradients, sum_over
from mt_core.parallel.tied_weights import TiedWeights

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

    sharded: whether the gradients are sharded over the ranks with the same weights. Methods are collective over the
    world; a single process communicates nothing.
    """

    def __init__(
        self, layouts: Mapping[str, ParameterLayout], ctx: ParallelContext, copies: TiedWeights, *, sharded: bool
    ) -> None:
        self.layouts, self.ctx, self.copies, self.sharded = layouts, ctx, copies, sharded

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
        if self.ctx.world.size == 1:
            blocks = norms([p.grad for _, p in named if p.grad is not None])
            if not blocks:
                return torch.zeros((), dtype=torch.float64, device=self.ctx.device)
            return torch.linalg.vector_norm(torch.stack(blocks), dtype=torch.float64)
        squares = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        own = [p.grad for name, p in named if p.grad is not None and self.counts(name)]
        if own:
            # Squared and summed in fp64: the square of an fp32 norm above 1.8e19 overflows fp32.
            squares += torch.stack(norms(own)).double().square().sum()
        return all_reduce(squares, self.ctx.world).sqrt()

    def zeros(self, named: Named) -> int:
        """Number of zeros in the whole model's gradient, without padding."""
        counted = [(name, p.grad) for name, p in named if p.grad is not None and self.counts(name)]
        own = sum(int((gradient == 0).sum()) for _, gradient in counted)
        # The rank with the first part subtracts the padding of the whole parameter, so that it is subtracted once.
        own -= sum(self._padding(name) for name, _ in counted if self._has_first_part(name))
        (total,) = sum_over([float(own)], self.ctx.world, self.ctx.device)
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
        shard = self.ctx.axis(SHARDS[layout.replicas][0])
        parts = [self.ctx.axis(split.axis) for split in layout.splits] + ([shard] if self.sharded else [])
        return all(axis.rank == 0 for axis in parts)

    def counts(self, name: str) -> bool:
        """Whether this rank is the one replica that counts this gradient in sums."""
        layout = self.layouts[name]
        dividing = {split.axis for split in layout.splits}
        # On an axis that does not split it, the tensor is replicated: its ranks other than 0 do not count it.
        copies: list[Axis] = [self.ctx.axis(axis) for axis in OTHER_AXES[layout.replicas] if axis not in dividing]
        # Sharded gradients are partitioned over `shard`, where each rank counts its own part, and replicated over
        # `replicate`.
        copies.append(self.ctx.axis(SHARDS[layout.replicas][1] if self.sharded else layout.replicas))
        if name in self.copies.axes:
            copies.append(self.copies.axes[name])
        return all(axis.rank == 0 for axis in copies)
