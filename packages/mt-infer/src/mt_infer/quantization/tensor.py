"""A matrix that is in memory as quantized numbers, and how products read it on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mt_core._torch_compat import call_without_overrides, tensor_without_memory
from mt_infer.quantization.groups import Stored
from mt_infer.quantization.triton_product import triton_dequantize, triton_product


class Groups(Protocol):
    """Rows in the order of experts, as mt_moe has them."""

    ends: Tensor
    """[E] int32"""


GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]
MOST_ROWS = 256
"""Rows of a product that reads the stored numbers, once for each 64 rows: at most 4 times, 4 bytes a number or less. To
dequantize moves 4.5 or 5 (the stored number, two bytes written, two read), and with more rows the tensor cores are the
limit, which a dense GEMM uses better than a kernel that converts its operand for each tile of rows."""


class QuantizedTensor(Tensor):
    """[..., out, in] in the dtype of the model. `linear` multiplies by the stored numbers where there are few rows;
    every other operation gets the dequantized matrix."""

    stored: Stored
    group: int

    @staticmethod
    def __new__(cls, stored: Stored, group: int, columns: int, dtype: torch.dtype) -> QuantizedTensor:
        # From outside it is the dense matrix: shape, dtype and device are those of the weight that it stands for.
        shape = (*stored[0].shape[:-1], columns)
        tensor = tensor_without_memory(cls, shape, dtype, stored[0].device)
        assert isinstance(tensor, QuantizedTensor)
        tensor.stored, tensor.group = stored, group
        return tensor

    def dequantized(self) -> Tensor:
        return triton_dequantize(self.stored, self.group, self.shape[-1], self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Every linear layer multiplies by F.linear.
        if func is F.linear:
            return quantized_linear(*args, **kwargs)
        return call_without_overrides(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every operator that was not taken above sees a dense tensor, so that nothing computes with stored numbers by
        # mistake.
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)


def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] -> [..., out]"""
    assert isinstance(weight, QuantizedTensor)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MOST_ROWS:
        # The dense matrix lives for this call only.
        return F.linear(x, weight.dequantized(), bias)
    return triton_product(rows, weight.stored, weight.group, bias).unflatten(0, x.shape[:-1])


class QuantizedGroupedProduct:
    """A product with the matrices of experts (mt_moe.experts.loop.GroupedProduct): x [R, in], weight [E, out, in].

    dense: of dequantized matrices, for many rows. What a launch reads are the matrices of experts that have rows.
    """

    def __init__(self, dense: GroupedProduct) -> None:
        self.dense = dense

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        assert isinstance(weight, QuantizedTensor)
        # Rows of all experts together: the number of each expert's is on the device, and reading it would wait.
        if len(x) > MOST_ROWS * len(weight):
            return self.dense(x, weight, groups)
        return triton_product(x, weight.stored, weight.group, ends=groups.ends)
