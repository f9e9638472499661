"""What is kept of the inputs of a matrix: second moments, magnitudes, and how many there were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.parallel.reductions import all_reduce_
from mt_tools.calibration.matrices import Matrix


class InputStatistics:
    """Inputs of one matrix [out, in]. moments: sum of x x^T, fp32 [in, in], if kept. largest: of |x|, [in]. total: sum
    of |x|, [in]. count: inputs seen."""

    def __init__(self, width: int, device: torch.device, *, moments: bool) -> None:
        self.moments = torch.zeros(width, width, device=device) if moments else None
        self.squares, self.total, self.largest = (torch.zeros(width, device=device) for _ in range(3))
        self.count = torch.zeros((), device=device, dtype=torch.int64)

    def add(self, rows: Tensor) -> None:
        """rows: [n, in]"""
        if not len(rows):
            return
        rows = rows.float()
        if self.moments is not None:
            self.moments.addmm_(rows.T, rows)
        self.squares += rows.square().sum(0)
        sizes = rows.abs()
        self.total += sizes.sum(0)
        torch.maximum(self.largest, sizes.amax(0), out=self.largest)
        self.count += len(rows)

    def reduce(self, matrix: Matrix) -> None:
        """Over ranks that have seen other inputs of the same matrix. Collective."""
        for axis in matrix.sum_axes:
            for part in (self.moments, self.squares, self.total, self.count):
                if part is not None:
                    all_reduce_(part, axis)
            all_reduce_(self.largest, axis, "max")

    @property
    def mean_squares(self) -> Tensor:
        return self.squares / self.count.clamp(min=1)

    @property
    def mean_sizes(self) -> Tensor:
        return self.total / self.count.clamp(min=1)


@contextmanager
def recorded_inputs(
    matrices: Sequence[Matrix], *, moments: bool, sums: bool = True
) -> Iterator[Mapping[str, list[InputStatistics]]]:
    """Matrix -> statistics of its inputs while the model computes, one for each expert of this rank; summed over ranks
    at the end. Collective."""
    kept = {matrix.name: _empty(matrix, moments=moments) for matrix in matrices}
    hooks = [matrix.module.register_forward_pre_hook(_Recorder(matrix, kept), with_kwargs=True) for matrix in matrices]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
    for matrix in matrices if sums else ():
        for statistics in kept[matrix.name]:
            statistics.reduce(matrix)


def _empty(matrix: Matrix, *, moments: bool) -> list[InputStatistics]:
    width, device = matrix.layout.shape[-1], matrix.module.ctx.device
    number = matrix.layout.shape[0] // matrix.expert_axis.size if matrix.has_experts else 1
    return [InputStatistics(width, device, moments=moments) for _ in range(number)]


class _Recorder:
    """A hook before the forward pass of a module."""

    def __init__(self, matrix: Matrix, kept: Mapping[str, list[InputStatistics]]) -> None:
        self.matrix, self.statistics = matrix, kept[matrix.name]

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        x: Tensor = inputs[0]
        if not self.matrix.has_experts:
            self.statistics[0].add(self.matrix.whole_inputs(x.detach()).flatten(0, -2))
            return
        # Rows in the order of experts, or tokens that the product permutes (mt_moe.experts.loop.Groups).
        order = keywords.get("read")
        rows = self.matrix.whole_inputs((x if order is None else order.permute(x)).detach())
        for statistics, (first, end) in zip(self.statistics, inputs[1].bounds, strict=True):
            statistics.add(rows[first:end])
