"""Products of int8 with int8: a matrix has a scale for each output feature, and each row of inputs, which is quantized
as it arrives, has another one (W8A8 with dynamic activations).

The sums are exact in int32, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mt_core._torch_compat import (
    call_without_overrides,
    int8_product,
    pack_int8_weight,
    packed_int8_linear,
    tensor_without_memory,
)
from mt_infer.quantization.groups import INT8_MAX, Stored, dequantize_scaled

if TYPE_CHECKING:
    from mt_infer.quantization.tensor import Groups

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Int8Matrix(Tensor):
    """[..., out, in] in the dtype of the model. `linear` multiplies int8 with int8; a table that is looked up gives the
    dequantized rows; every other operation gets the dequantized matrix."""

    stored: Stored
    """int8 [..., out, in] and scales [..., out, 1] in fp32."""
    packed: tuple[Tensor, Tensor] | None
    """On a CPU with AMX: the matrix as oneDNN orders it, made with the first product, and zero points."""
    experts: list[Int8Matrix]
    """Those of [experts, out, in]."""

    @staticmethod
    def __new__(cls, stored: Stored, dtype: torch.dtype) -> Int8Matrix:
        matrix = tensor_without_memory(cls, tuple(stored[0].shape), dtype, stored[0].device)
        assert isinstance(matrix, Int8Matrix)
        matrix.stored, matrix.packed = stored, None
        matrix.experts = (
            [Int8Matrix(expert, dtype) for expert in zip(*stored, strict=True)] if stored[0].ndim == 3 else []
        )
        return matrix

    def dequantized(self) -> Tensor:
        return dequantize_scaled(*self.stored).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return int8_linear(*args, **kwargs)
        if func is F.embedding and isinstance(args[1], Int8Matrix):
            return looked_up(args[0], args[1])
        return call_without_overrides(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Int8Matrix, Int8Matrix.dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)


def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] -> [..., out]"""
    assert isinstance(weight, Int8Matrix)
    values, scale = quantize_rows(x.reshape(-1, x.shape[-1]).float())
    product = _product(values, weight).mul_(scale).to(x.dtype)
    if bias is not None:
        product = product + bias
    return product.unflatten(0, x.shape[:-1])


def quantize_rows(x: Tensor) -> Stored:
    """`quantize_int8` of [M, in], in fewer operators: for one row each of them takes as long as the product."""
    scale = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True).div_(INT8_MAX)
    # A row of zeros stays one, whatever its scale.
    return (x / scale.clamp_min_(SMALLEST_SCALE)).round_().to(torch.int8), scale


def _product(values: Tensor, weight: Int8Matrix) -> Tensor:
    """int8 [M, in] -> fp32 [M, out], times the scales of the matrix."""
    matrix, scale = weight.stored
    scale = scale.squeeze(-1)
    if weight.packed is None and (packed := pack_int8_weight(matrix)) is not None:
        weight.packed = packed, torch.zeros(len(matrix), dtype=torch.int32)
    if weight.packed is not None:
        return packed_int8_linear(values, weight.packed[0], scale, weight.packed[1])
    return int8_product(values, matrix) * scale


def looked_up(ids: Tensor, table: Int8Matrix) -> Tensor:
    """ids [...] -> rows [..., width]"""
    values, scale = table.stored
    return dequantize_scaled(F.embedding(ids, values), F.embedding(ids, scale)).to(table.dtype)


def expert_products(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """x [R, in], rows in the order of experts, and weight [E, out, in] -> [R, out]; rows behind the last are zeros."""
    assert isinstance(weight, Int8Matrix)
    product, first = x.new_zeros(len(x), weight.shape[1]), 0
    for matrix, end in zip(weight.experts, groups.ends.tolist(), strict=True):
        if end > first:
            product[first:end] = int8_linear(x[first:end], matrix)
        first = end
    return product
