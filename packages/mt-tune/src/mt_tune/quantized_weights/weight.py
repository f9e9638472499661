"""A frozen weight in codes and scales, under the name of the weight that it stands for, and its products.

The dense weight lives while a product is computed, forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from mt_ckpt.quantized.weights import row_slices
from mt_core._torch_compat import gradients_wanted
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split
from mt_core.nn.linear import SEQUENCE_DIM, Cut, leave_tensor_parallel
from mt_core.parallel.collectives import copy_to, gather_from
from mt_core.parallel.context import ParallelContext
from mt_tune.quantized_weights.formats import Format, Part, as_bytes, from_bytes


class QuantizedWeight(LayoutModule):
    """A weight [..., out, in] of a layer. Its parameters are the parts of the format, uint8 [..., out, size(, 4)].

    `layout` is that of the dense weight. Parts are divided over ranks as it is.
    """

    def __init__(self, layout: ParameterLayout, form: Format, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.layout, self.form = layout, form
        self.parts = form.parts(layout.shape[-1])
        for part in self.parts:
            self.declare(part.name, part_layout(part, layout, form))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights of the model, as callers of a dense weight expect."""
        return self.ctx.params_dtype

    @property
    def device(self) -> torch.device:
        return self.ctx.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight of this rank."""
        return torch.Size(self.layout.local_shape(self.ctx))

    def part(self, name: str) -> Tensor:
        """This rank's bytes, which FSDP2 may have divided further, or cast."""
        stored = self._parameters[name]
        assert stored is not None
        return (stored.full_tensor() if isinstance(stored, DTensor) else stored).detach().to(torch.uint8)

    @torch.no_grad()
    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight of this rank [..., out, in], made anew by each call."""
        stored = {part.name: self.part(part.name) for part in self.parts}
        return dequantized(self.form, self.layout, stored, self.shape, dtype, self._first_column())

    def _first_column(self) -> int:
        cuts = [self.ctx.axis(split.axis) for split in self.layout.splits if split.dim == len(self.layout.shape) - 1]
        return sum(axis.rank * (self.layout.shape[-1] // axis.size) for axis in cuts)


def dequantized(
    form: Format,
    layout: ParameterLayout,
    stored: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    first_column: int = 0,
) -> Tensor:
    """Dense [..., out, in] of `shape`. stored: part -> bytes [..., out, size(, 4)]. Some rows at a time."""
    is_float = {part.name: part.is_float for part in form.parts(layout.shape[-1])}
    rows, columns = math.prod(shape[:-1]), shape[-1]
    flat = {name: values.flatten(0, len(shape) - 2) for name, values in stored.items()}
    dense = torch.empty(rows, columns, dtype=dtype, device=next(iter(flat.values())).device)
    for part in row_slices(rows, columns):
        part_values = {
            name: from_bytes(values[part]) if is_float[name] else values[part] for name, values in flat.items()
        }
        dense[part] = form.dequantize(part_values, columns, first_column, layout.shape[-1]).to(dtype)
    return dense.view(shape)


def part_layout(part: Part, weight: ParameterLayout, form: Format) -> ParameterLayout:
    last = len(weight.shape) - 1
    splits = tuple(split for split in weight.splits if split.dim < last or part.follows_inputs)
    return replace(
        weight,
        shape=(*weight.shape[:-1], *part.shape),
        init=partial(_random, part, form),
        splits=tuple(_plain(split, last) for split in splits),
        partial_gradient=(),
        dtype=torch.uint8,
        trained=False,
        lr_mult=1.0,
    )


def _plain(split: Split, last: int) -> Split:
    """Blocks of columns lie end to end: a rank has one run of each part."""
    assert split.dim < last or split.sections == 1
    return split


def _random(part: Part, form: Format, tensor: Tensor, generator: torch.Generator) -> None:
    if not part.is_float:
        form.random(part.name, tensor, generator)
        return
    numbers = tensor[..., 0].clone()
    form.random(part.name, numbers, generator)
    tensor.copy_(as_bytes(numbers))


# -- linear layers -------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """x [..., in] -> x W^T [..., out]. Nothing is kept for the backward pass but the codes, which are there anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (wants_dx,) = gradients_wanted(ctx, 1)
        return (grads[0] @ ctx.weight.dense(grads[0].dtype) if wants_dx else None), None


def quantized_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [..., in] -> [..., out] with this rank's weight, which has no gradient."""
    return cast(Tensor, _Linear.apply(x, weight))


class QuantizedMultiply:
    """The product of a linear layer (mt_core.nn.linear.Multiply) whose features are divided as `cut` says."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        if self.cut == "output" and ctx.tp.size > 1:
            x = gather_from(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else copy_to(x, ctx.tp)
        out = quantized_linear(x, weight)
        if self.cut == "input" and ctx.tp.size > 1:
            out = leave_tensor_parallel(out, ctx)
        return out if bias is None else out + bias


# -- experts -------------------------------------------------------------------------------------------

Order = Literal["", "of_tokens", "to_tokens"]
REVERSED: dict[Order, Order] = {"": "", "of_tokens": "to_tokens", "to_tokens": "of_tokens"}


class _Grouped(torch.autograd.Function):
    """A grouped product; its gradient is the product with the transposed matrices, in the reverse order of rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedWeight, plain: Any, order: Order, groups: tuple[Any, ...]
    ) -> Tensor:
        ctx.weight, ctx.plain, ctx.order, ctx.groups = weight, plain, order, groups
        return _product(plain, order)(x, weight.dense(x.dtype), *groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (wants_dx,) = gradients_wanted(ctx, 1)
        if not wants_dx:
            return (None,) * 5
        grad = grads[0].contiguous()
        turned = ctx.weight.dense(grad.dtype).mT
        # Kernels of a GPU take matrices that lie row by row.
        matrices = turned if turned.device.type == "cpu" else turned.contiguous()
        return _product(ctx.plain, REVERSED[ctx.order])(grad, matrices, *ctx.groups), None, None, None, None


def _product(plain: Any, order: Order) -> Any:
    return getattr(plain, order) if order else plain


class QuantizedProduct:
    """A product with the matrices of experts (mt_moe.experts.loop.GroupedProduct)."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, x: Tensor, weight: Any, groups: Any) -> Tensor:
        return cast(Tensor, _Grouped.apply(x, weight, self.plain, "", (groups,)))


class QuantizedPermutingProduct(QuantizedProduct):
    """One that permutes rows itself (mt_moe.experts.loop.PermutingProduct)."""

    def of_tokens(self, x: Tensor, weight: Any, groups: Any, order: Any) -> Tensor:
        return cast(Tensor, _Grouped.apply(x, weight, self.plain, "of_tokens", (groups, order)))

    def to_tokens(self, x: Tensor, weight: Any, groups: Any, order: Any) -> Tensor:
        return cast(Tensor, _Grouped.apply(x, weight, self.plain, "to_tokens", (groups, order)))


def quantized_product(plain: Any) -> QuantizedProduct:
    return (QuantizedPermutingProduct if hasattr(plain, "of_tokens") else QuantizedProduct)(plain)
