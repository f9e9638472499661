"""Gradients over the axes that divide a model: parts are summed, copies counted once."""

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
from mt_core.parallel.stage_copies import StageCopies

Named = Iterable[tuple[str, nn.Parameter]]

OTHER_AXES: Mapping[AxisName, tuple[AxisName, ...]] = {"dp_cp": ("tp",), "edp": ("etp", "ep")}
"""Replica axis of a layout -> the other axes of a stage's grid, which hold copies unless they divide the tensor."""
SHARDS: Mapping[AxisName, tuple[AxisName, AxisName]] = {
    "dp_cp": ("shard", "instances"),
    "edp": ("expert_shard", "expert_instances"),
}
"""Replica axis of a layout -> the axis whose ranks share the optimizer's state, and the one whose ranks repeat it."""


class GradientSums:
    """Completes gradients that were summed over data-parallel ranks, and measures them.

    divided: whether ranks with the same weights hold different parts of the gradients. Collective over the world,
    but for a single process, which it costs nothing.
    """

    def __init__(
        self, layouts: Mapping[str, ParameterLayout], ctx: ParallelContext, copies: StageCopies, *, divided: bool
    ) -> None:
        self.layouts, self.ctx, self.copies, self.divided = layouts, ctx, copies, divided

    def complete(self, named: Named) -> None:
        """Sum what each rank computed from its positions alone, and what several stages computed for one weight."""
        if self.ctx.world.size == 1:
            return
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        partial: dict[AxisName, list[Tensor]] = {}
        for name, gradient in gradients.items():
            for axis in self.layouts[name].partial_gradient:
                partial.setdefault(axis, []).append(gradient)
        for axis, parts in partial.items():
            sum_gradients(parts, self.ctx.axis(axis))
        for shared, holders in self.copies.axes.items():
            if shared in gradients:
                sum_gradients([gradients[shared]], holders)

    def norm(self, named: Named) -> Tensor:
        """[] on the device: the 2-norm of the whole model's gradient; the same number on every rank.

        fp64, or in one process the format of the gradients. Nothing waits for the device.
        """
        if self.ctx.world.size == 1:
            return torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])
        squares = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        own = [p.grad for name, p in named if p.grad is not None and self.counts(name)]
        if own:
            squares += torch.stack(norms(own)).double().square().sum()
        return all_reduce(squares, self.ctx.world).sqrt()

    def zeros(self, named: Named) -> int:
        """How many elements of the whole model's gradient are 0, padding left out."""
        counted = [(name, p.grad) for name, p in named if p.grad is not None and self.counts(name)]
        own = sum(int((gradient == 0).sum()) for _, gradient in counted)
        own -= sum(self._padding(name) for name, _ in counted if self._has_first_part(name))
        (total,) = sum_over([float(own)], self.ctx.world, self.ctx.device)
        return int(total)

    def _padding(self, name: str) -> int:
        """Elements of a parameter that are in memory only; their gradient is 0."""
        layout = self.layouts.get(name)
        if layout is None:
            return 0
        return math.prod(layout.padded.get(dim, n) for dim, n in enumerate(layout.shape)) - math.prod(layout.shape)

    def _has_first_part(self, name: str) -> bool:
        """Whether this rank is the first of those that hold different parts of a gradient."""
        layout = self.layouts[name]
        shard = self.ctx.axis(SHARDS[layout.replicas][0])
        parts = [self.ctx.axis(split.axis) for split in layout.splits] + ([shard] if self.divided else [])
        return all(axis.rank == 0 for axis in parts)

    def counts(self, name: str) -> bool:
        """Whether this rank is the one, of those that hold the same part of this gradient, that counts it."""
        layout = self.layouts[name]
        dividing = {split.axis for split in layout.splits}
        copies: list[Axis] = [self.ctx.axis(axis) for axis in OTHER_AXES[layout.replicas] if axis not in dividing]
        copies.append(self.ctx.axis(SHARDS[layout.replicas][1] if self.divided else layout.replicas))
        if name in self.copies.axes:
            copies.append(self.copies.axes[name])
        return all(axis.rank == 0 for axis in copies)
