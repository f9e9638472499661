"""Inputs of linear layers rounded token by token, as readers of W8A8 schemes do while they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mt_ckpt.quantized.grids import Grid, rounded
from mt_core.parallel.reductions import all_reduce_
from mt_tools.calibration.matrices import Matrix, matrices_of


@contextmanager
def quantized_inputs(model: nn.Module, grid: Grid | None) -> Iterator[None]:
    """Within it matrices multiply rounded inputs; nothing changes without a grid."""
    matrices = [] if grid is None else list(matrices_of(model))
    hooks = [matrix.module.register_forward_pre_hook(_Rounding(matrix, grid)) for matrix in matrices]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Rounding:
    """A hook before the forward pass of a module."""

    def __init__(self, matrix: Matrix, grid: Grid | None) -> None:
        assert grid is not None
        self.matrix, self.grid = matrix, grid

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = inputs[0]
        return (self._rounded(x).to(x.dtype), *inputs[1:])

    def _rounded(self, x: Tensor) -> Tensor:
        rows = x.float().flatten(0, -2)
        bounds = torch.stack([rows.amin(-1, keepdim=True), -rows.amax(-1, keepdim=True)])
        for name in self.matrix.sharding_axes_of_inputs:
            all_reduce_(bounds, self.matrix.module.ctx.axis(name), "min")
        scales = self.grid.scales(bounds[0], -bounds[1], torch.float32, 0.0)
        return rounded(self.grid, rows[:, None], scales)[:, 0].view_as(x)
