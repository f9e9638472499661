"""Weights and inputs rounded as the files of a scheme will hold them, in every layout; the gradient is that of no
rounding (Bengio et al., 2013)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.quantized.grids import Grid, in_groups, rounded
from mt_ckpt.quantized.quantizer import PacksCodes
from mt_core.errors import ConfigError
from mt_core.nn.layout import LayoutModule, ParameterLayout
from mt_core.nn.main_grad import main_gradient_of
from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import all_reduce_


class _StraightThrough(torch.autograd.Function):
    """(x, rounded) -> rounded, whose gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        # A gradient that the product has added to the main gradient stays None: the node of the weight sees it so.
        ctx.set_materialize_grads(False)
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return grads[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The values of `rounded`, with the gradient, and the main gradient, of x."""
    result = _StraightThrough.apply(x, rounded)
    assert isinstance(result, Tensor)
    main = main_gradient_of(x)
    if main is not None:
        result.main_grad = main  # type: ignore[attr-defined]
    return result


WEIGHT = "weight"


class WeightRounding:
    """Rounding of the weight of a module, [out, in] or [experts, out, in] of this rank."""

    def __init__(self, name: str, module: LayoutModule, scheme: PacksCodes) -> None:
        """Raises ConfigError for a weight that the scheme cannot hold, and for groups that a layout would cut."""
        layout = module.layouts[WEIGHT]
        self.scheme, self.grid = scheme, scheme.grid
        last = len(layout.shape) - 1
        self.input_axes = _axes(module, layout, last)
        self.row_axes = _axes(module, layout, last - 1)
        require_whole_groups(name, module, scheme.grid)

    @torch.no_grad()
    def values(self, weight: Tensor) -> Tensor:
        """The nearest numbers, in the dtype of the weight. Collective over what shards it, where scales are shared."""
        if weight.is_meta:  # of a plan
            return torch.empty_like(weight)
        matrices = weight.detach().float()
        each = [self._rounded(matrix, weight.dtype) for matrix in (matrices if matrices.ndim == 3 else matrices[None])]
        values = torch.stack(each) if matrices.ndim == 3 else each[0]
        # As readers return it: of some schemes in fewer bits than the weight.
        return values.to(self.scheme.value_dtype(weight.dtype)).to(weight.dtype)

    def __call__(self, weight: Tensor) -> Tensor:
        return straight_through(weight, self.values(weight))

    def _rounded(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        groups = in_groups(matrix, self.grid.size)
        low, high = groups.amin(-1), groups.amax(-1)
        if self.grid.size is None:
            low, high = _over(self.input_axes, low, high)
        largest = matrix.abs().amax().reshape(1) if self.scheme.shares_largest else matrix.new_zeros(1)
        if self.scheme.shares_largest:
            for axis in (*self.input_axes, *self.row_axes):
                all_reduce_(largest, axis, "max")
        scales = self.grid.scales(low, high, self.scheme.scale_dtype(dtype), largest.item())
        return rounded(self.grid, groups, scales).flatten(1)


class InputRounding:
    """Rounding of inputs [..., in], with a scale for each token over the features of all ranks."""

    def __init__(self, module: LayoutModule, grid: Grid) -> None:
        layout = module.layouts[WEIGHT]
        self.grid, self.axes = grid, _axes(module, layout, len(layout.shape) - 1)

    def __call__(self, x: Tensor) -> Tensor:
        return straight_through(x, self.values(x))

    @torch.no_grad()
    def values(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return torch.empty_like(x)
        rows = x.detach().float().flatten(0, -2)
        low, high = _over(self.axes, rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True))
        scales = self.grid.scales(low, high, torch.float32, 0.0)
        return rounded(self.grid, rows[:, None], scales)[:, 0].view_as(x).to(x.dtype)


def _axes(module: LayoutModule, layout: ParameterLayout, dim: int) -> list[Axis]:
    """That shard a dimension of the weight."""
    return [module.ctx.axis(split.axis) for split in layout.splits if split.dim == dim]


def _over(axes: Sequence[Axis], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest over ranks."""
    bounds = torch.stack([low, -high])
    for axis in axes:
        all_reduce_(bounds, axis, "min")
    return bounds[0], -bounds[1]


def require_whole_groups(name: str, module: LayoutModule, grid: Grid) -> None:
    layout = module.layouts[WEIGHT]
    columns = layout.local_shape(module.ctx)[-1]
    if grid.size is not None and columns % grid.size:
        raise ConfigError(
            f"quantize.scheme: groups of {grid.size} columns do not fit {name}, of which a rank has {columns}; the "
            "names of schemes with groups end with another size, such as w4a16-g32"
        )
