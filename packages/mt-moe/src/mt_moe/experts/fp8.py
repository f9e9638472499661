"""Grouped GEMM of experts in FP8, with a scale for each row of both operands.

All operands are e4m3, gradients as well: torch's scaled_grouped_mm takes no other FP8 dtype. The scale of each row
compensates for the smaller range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gradients_wanted, scaled_grouped_mm
from mt_core.nn.fp8.multiply import emulated_product
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.reference.fp8_casts import ALIGNMENT, E4M3, Scaled, cast_rows, scale_of, to_fp8
from mt_core.nn.kernels.reference.microscaling import cast_mx
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_moe.experts import grouped, loop
from mt_moe.experts.loop import Groups

SERVED = ((9, 0), (10, 0))
"""Compute capabilities of GPUs on which torch's scaled_grouped_mm runs."""


class ScaledGroups(Protocol):
    """The two kinds of products, cast and multiplied. margin: powers of two of headroom that scales leave."""

    def rows_times(self, x: Tensor, matrices: Tensor, groups: Groups, margin: int, *, fast: bool) -> Tensor:
        """x [R, n], matrices [E, m, n] -> [R, m]: the rows of expert e times matrices[e]^T"""
        ...

    def outer(self, grad: Tensor, x: Tensor, groups: Groups, margin: int) -> Tensor:
        """grad [R, out], x [R, in] -> [E, out, in], summed over the rows of each expert; zeros for one without any"""
        ...

    def wide_outer(self, grad: Tensor, x: Tensor, groups: Groups, main: MainGrad | None) -> Tensor | None:
        """The same in the dtype of x, or None if it was accumulated into main_grad."""
        ...


@dataclass(frozen=True)
class EmulatedGroups:
    """One expert after another, in fp32. The reference."""

    cast: Callable[[Tensor, torch.dtype, int], Scaled] = cast_rows
    """(x, format, margin) -> x with scales along its rows."""

    def rows_times(self, x: Tensor, matrices: Tensor, groups: Groups, margin: int, *, fast: bool) -> Tensor:
        out = x.new_empty(len(x), matrices.shape[1])
        for matrix, (first, end) in zip(matrices, groups.bounds, strict=True):
            # Scales [rows, 1] of both operands.
            a, b = self.cast(x[first:end], E4M3, margin), self.cast(matrix, E4M3, margin)
            out[first:end] = emulated_product(a, b, x.dtype, fast=fast)
        return out

    def outer(self, grad: Tensor, x: Tensor, groups: Groups, margin: int) -> Tensor:
        weight_grad = x.new_zeros(len(groups.counts), grad.shape[1], x.shape[1])
        for expert, (first, end) in enumerate(groups.bounds):
            if end > first:
                # Transposed: the reduction is over the expert's rows, and scales have to be constant along it.
                a, b = self.cast(grad[first:end].t(), E4M3, margin), self.cast(x[first:end].t(), E4M3, margin)
                weight_grad[expert] = emulated_product(a, b, x.dtype, fast=False)
        return weight_grad

    def wide_outer(self, grad: Tensor, x: Tensor, groups: Groups, main: MainGrad | None) -> Tensor | None:
        return loop.weight_gradient(grad, x, groups, main)


class TorchGroups:
    """torch's scaled_grouped_mm: all experts in one kernel, without a host synchronization."""

    def rows_times(self, x: Tensor, matrices: Tensor, groups: Groups, margin: int, *, fast: bool) -> Tensor:
        a, b = cast_rows(x, E4M3, margin), cast_rows(matrices.flatten(0, 1), E4M3, margin)
        per_expert = matrices.shape[:2]
        # [E * m, n] -> [E, n, m]: the kernel takes the second operand column-major.
        data = b.data.unflatten(0, per_expert).mT
        return _grouped(a.data, data, a.scale.flatten(), b.scale.view(per_expert), groups.ends, fast=fast)

    def outer(self, grad: Tensor, x: Tensor, groups: Groups, margin: int) -> Tensor:
        places = AlignedRows(groups, len(x))
        a, a_scale = places.cast(grad, margin)
        b, b_scale = places.cast(x, margin)
        # [out, room] times [room, in] in groups along the reduction -> [E, out, in]
        return _grouped(a, b.t(), a_scale.flatten(), b_scale.flatten(), places.ends, fast=False)

    def wide_outer(self, grad: Tensor, x: Tensor, groups: Groups, main: MainGrad | None) -> Tensor | None:
        return grouped.weight_gradient(grad, x, groups, main)


def _grouped(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, *, fast: bool) -> Tensor:
    return scaled_grouped_mm(a, b, (a_scale, b_scale), ends, torch.bfloat16, fast=fast)


class AlignedRows:
    """Rows padded so that those of each expert begin at a multiple of 16: the kernel sums over rows in steps of 16.
    The buffer has the largest size that this can need, which the host computes without reading the counts."""

    def __init__(self, groups: Groups, rows: int) -> None:
        # counts 3 and 20: sizes 16 and 32, ends 16 and 48; rows of the second expert move from position 3 to 16, a
        # shift of 13.
        sizes = (groups.counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        ends = sizes.cumsum(0)
        shifts = (ends - sizes) - (groups.counts.cumsum(0) - groups.counts)
        self.experts = groups.numbers(rows)
        self.count = len(groups.counts)
        # Each expert adds less than ALIGNMENT positions.
        self.room = -(-rows // ALIGNMENT) * ALIGNMENT + self.count * ALIGNMENT
        self.present = groups.present(rows)[:, None]
        self.places = torch.arange(rows, device=ends.device) + shifts[self.experts]
        self.ends = ends.to(torch.int32)

    def cast(self, x: Tensor, margin: int) -> tuple[Tensor, Tensor]:
        """[R, n] -> ([n, room] FP8 with zeros between, [E, n] scales of each column among the rows of an expert)"""
        x = torch.where(self.present, x, 0)  # rows that belong to no expert are undefined
        rows_of = self.experts[:, None].expand_as(x)
        amax = x.new_zeros((self.count, x.shape[1]), dtype=torch.float32)
        # [E, n]: the largest absolute value of each column among the rows of an expert
        amax = amax.scatter_reduce(0, rows_of, x.abs().float(), "amax")
        scale = scale_of(amax, E4M3, margin)
        # index_copy is not implemented for FP8; the bytes are copied as they are.
        data = to_fp8(x, scale[self.experts], E4M3).view(torch.uint8)
        apart = data.new_zeros((self.room, x.shape[1])).index_copy(0, self.places, data)
        return apart.t().contiguous().view(E4M3), scale


@dataclass(frozen=True)
class Fp8GroupedProduct:
    """A GroupedProduct in FP8. wgrad_in_fp8=False: weight gradients are computed in the dtype of the weights."""

    groups: ScaledGroups
    margin: int
    wgrad_in_fp8: bool

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return _Fp8GroupedProduct.apply(x, weight, groups, self, main_gradient_of(weight))

    def host_wait(self) -> str | None:
        """See ExpertLinear."""
        if not isinstance(self.groups, EmulatedGroups):
            return None
        return "precision.fp8_implementation=emulated reads the number of rows of each expert; use torch"


class _Fp8GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, product: Fp8GroupedProduct, main: MainGrad | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.product, ctx.main = groups, product, main
        return product.groups.rows_times(x, weight, groups, product.margin, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        product: Fp8GroupedProduct = ctx.product
        grad = grads[0].contiguous()
        wants_dx, wants_dweight = gradients_wanted(ctx, 2)
        dx = dweight = None
        if wants_dx:
            # [R, out] times [E, in, out] transposed -> [R, in]
            dx = product.groups.rows_times(grad, weight.mT, ctx.groups, product.margin, fast=False)
        if wants_dweight and product.wgrad_in_fp8:
            dweight = product.groups.outer(grad, x, ctx.groups, product.margin)
        elif wants_dweight:
            dweight = product.groups.wide_outer(grad, x, ctx.groups, ctx.main)
        return dx, dweight, None, None, None


def fp8_grouped_product(options: Fp8Options, weight: Tensor) -> Fp8GroupedProduct | str:
    """For a weight [E, out, in] of this rank; or why it cannot be in FP8."""
    is_mx = options.config.fp8_recipe == "mxfp8"
    multiple = options.multiple if is_mx else ALIGNMENT
    objection = options.objection(weight.shape[1:], multiple) or _objection(options, weight.device)
    if objection is not None:
        return objection
    # On the meta device, where nothing is computed, plans take the memory of a GPU's kernels.
    is_emulated = options.implementation == "emulated" and not weight.is_meta
    groups: ScaledGroups = EmulatedGroups(cast_mx if is_mx else cast_rows) if is_emulated else TorchGroups()
    return Fp8GroupedProduct(groups, options.margin, options.config.fp8_wgrad)


def _objection(options: Fp8Options, device: torch.device) -> str | None:
    recipe = options.config.fp8_recipe
    if recipe == "nvfp4" or (recipe == "mxfp8" and options.implementation != "emulated"):
        return f"experts have no {options.implementation} product in {recipe}"
    if options.implementation == "emulated":
        return None
    if options.implementation != "torch":
        return f"experts have torch's grouped product in FP8, not one of {options.implementation}"
    if device.type != "cuda":
        return "torch's grouped product in FP8 runs on a GPU alone"
    capability = torch.cuda.get_device_capability(device)
    return None if capability in SERVED else f"no grouped product in FP8 on compute capability {capability}"
