"""FP8 casts and products of GPUs for planning: they compute nothing, and have the memory of the real kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.fp8.activated import Activated, Matrix
from mt_core.nn.fp8.cast_implementations import Along, WholeCast
from mt_core.nn.fp8.casts import BLOCK, Granularity, Scaled
from mt_core.nn.fp8.feed_forward import Fp8FeedForward
from mt_core.nn.fp8.multiply import Fp8Multiply
from mt_core.nn.linear import LinearModule


class PlannedCasts:
    """As mt_core.nn.kernels.triton_kernels.fp8_activations.TritonActivationCasts: without temporaries."""

    def amaxes(self, x: Matrix) -> Tensor:
        return _tensor_of(x).new_empty((), dtype=torch.float32)

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        return self.by_scale(x, amaxes, dtype, along)

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        rows, columns = x.shape
        transposed = None if along == "columns" else _empty(x, columns, rows, Granularity.TENSOR, dtype).t()
        data = _empty(x, rows, columns, None, dtype) if along != "rows" else transposed
        assert data is not None
        return WholeCast(Scaled(data, scale, Granularity.TENSOR), transposed)

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        return self.by_scale(x, past, dtype, along)

    def rows(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return _by_lines(x, dtype, Granularity.ROW, (x.shape[0], 1))

    def row_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return _by_lines(x, dtype, Granularity.ROW_BLOCK, (x.shape[0], -(-x.shape[1] // BLOCK)))

    def square_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return _by_lines(x, dtype, Granularity.SQUARE_BLOCK, (x.shape[0] // BLOCK, x.shape[1] // BLOCK))


def _by_lines(x: Matrix, dtype: torch.dtype, granularity: Granularity, scales: tuple[int, int]) -> Scaled:
    lines, length = x.shape
    data = _empty(x, lines, length, granularity, dtype)
    return Scaled(data, data.new_empty(scales, dtype=torch.float32), granularity)


def _empty(x: Matrix, lines: int, length: int, granularity: Granularity | None, dtype: torch.dtype) -> Tensor:
    """[lines, length], the length padded as products with the granularity take it."""
    multiple = 1 if granularity is None else granularity.multiple
    return _tensor_of(x).new_empty(lines, -(-length // multiple) * multiple, dtype=dtype)


def _tensor_of(x: Matrix) -> Tensor:
    return x.x if isinstance(x, Activated) else x


def planned_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """A product of fake tensors without memory, so that its FLOPs are counted."""
    left, right = (one.scale.new_empty((), dtype=dtype).expand(one.data.shape) for one in (a, b))
    return left @ right.t()


def use_planned_products(model: nn.Module) -> None:
    """In place of products that decode their operands."""
    for module in model.modules():
        if isinstance(module, LinearModule) and isinstance(module.multiply, Fp8Multiply):
            module.multiply = replace(module.multiply, product=planned_product)
        if isinstance(module, DenseFeedForward) and isinstance(module.joined, Fp8FeedForward):
            first, second = (
                replace(each, product=planned_product) for each in (module.joined.first, module.joined.second)
            )
            module.joined = replace(module.joined, first=first, second=second)
