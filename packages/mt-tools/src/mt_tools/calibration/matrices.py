"""Weights that are quantized, as a layout shards them: of linear layers, and of the experts of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from mt_ckpt.hugging_face.quantized_outputs import is_linear_weight
from mt_core.nn.layout import LayoutModule, ParameterLayout
from mt_core.nn.linear import LinearModule
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import Axis, AxisName
from mt_core.parallel.reductions import all_reduce_

WEIGHT = "weight"


@dataclass(frozen=True, eq=False)
class Matrix:
    """The weight of a layer, [out, in], or [experts, out, in]. name: canonical."""

    name: str
    module: LayoutModule

    @property
    def layout(self) -> ParameterLayout:
        return self.module.layouts[WEIGHT]

    @property
    def has_experts(self) -> bool:
        return len(self.layout.shape) == 3

    @cached_property
    def expert_axis(self) -> Axis:
        """Ranks with other experts."""
        names = [split.axis for split in self.layout.splits if split.dim == 0] if self.has_experts else []
        return self.module.ctx.axis(names[0]) if names else Axis()

    @property
    def first_expert(self) -> int:
        """Number of this rank's first expert in the model."""
        return self.expert_axis.rank * (self.layout.shape[0] // self.expert_axis.size) if self.has_experts else 0

    @cached_property
    def _gathered_layout(self) -> ParameterLayout:
        """Layout of what a rank gathers: whole matrices, of its own experts alone."""
        if not self.has_experts:
            return self.layout
        experts, *shape = self.layout.shape
        splits = tuple(split for split in self.layout.splits if split.dim > 0)
        return replace(self.layout, shape=(experts // self.expert_axis.size, *shape), splits=splits)

    # -- values ---------------------------------------------------------------------------------------

    def gather(self) -> Tensor:
        """Whole matrices in fp32: [out, in], or [experts of this rank, out, in]. Collective over what shards them."""
        weight = getattr(self.module, WEIGHT).detach()
        return self._gathered_layout.to_canonical(weight, self.module.ctx).float()

    def put(self, values: Tensor) -> None:
        """Set this rank's part of what `gather` gives."""
        weight = getattr(self.module, WEIGHT)
        with torch.no_grad():
            weight.copy_(self._gathered_layout.to_local(values, self.module.ctx))

    def largest(self, values: Tensor) -> float:
        """The largest magnitude of the whole weight, all experts included. Collective over the ranks with others."""
        most = values.abs().amax().reshape(1)
        all_reduce_(most, self.expert_axis, "max")
        return most.item()

    @property
    def is_stored_here(self) -> bool:
        """Whether this rank is the one, of all with the same matrices, that stores them."""
        ctx = self.module.ctx
        sharded = ("etp",) if self.has_experts else ("tp",)
        axes: list[AxisName] = [self.layout.replicas, *sharded]  # type: ignore[list-item]
        return all(ctx.axis(name).rank == 0 for name in axes)

    # -- inputs ---------------------------------------------------------------------------------------

    @property
    def sharding_axes_of_inputs(self) -> list[AxisName]:
        """Axes whose ranks have other input features."""
        return [split.axis for split in self.layout.splits if split.dim == len(self.layout.shape) - 1]

    def whole_inputs(self, x: Tensor) -> Tensor:
        """[..., in] of this rank's input features -> of all of them. Collective over the ranks that shard them."""
        last = len(self.layout.shape) - 1
        for split in reversed([split for split in self.layout.splits if split.dim == last]):
            axis = self.module.ctx.axis(split.axis)
            if axis.size > 1:
                shares = all_gather(x.contiguous(), x.ndim - 1, axis).chunk(axis.size, -1)
                x = replace(split, dim=x.ndim - 1).join(shares)
        return x

    @cached_property
    def sum_axes(self) -> list[Axis]:
        """Axes whose ranks have inputs of other samples or positions."""
        ctx = self.module.ctx
        names: list[AxisName] = [self.layout.replicas, *self.layout.partial_gradient]
        # It gathers the sequence itself: its input is this rank's part.
        if isinstance(self.module, LinearModule) and self.module.cut == "output" and ctx.sequence_parallel:
            names.append("tp")
        return [ctx.axis(name) for name in dict.fromkeys(names)]


def matrices_of(model: nn.Module) -> Iterator[Matrix]:
    """Those that files of a scheme hold quantized, in the order of the model."""
    for path, module in model.named_modules():
        if not isinstance(module, LayoutModule) or WEIGHT not in module.layouts:
            continue
        if is_linear_weight(f"{path}.{WEIGHT}") and len(module.layouts[WEIGHT].shape) in (2, 3):
            yield Matrix(f"{path}.{WEIGHT}", module)
