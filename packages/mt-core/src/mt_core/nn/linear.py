"""Linear layers whose weights are sharded over the tensor-parallel axis.

Shapes: B batch, S sequence, H hidden. With sequence parallelism the activations between these layers are
sharded along S: a column-parallel layer all-gathers its input, a row-parallel one reduce-scatters its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gather_matmul, gradients_wanted
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, sequence_axes, zeros
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_core.parallel.collectives import (
    all_gather,
    concat_shards,
    empty_shards,
    reduce_from,
    reduce_scatter_to,
    split_shards,
)
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.reductions import matmul_reduce_scatter, start_all_reduce_, start_reduce_scatter_into

SEQUENCE_DIM = 1
"""Dimension of the sequence in activations [B, S, H]."""
Cut = Literal["output", "input", "none"]
"""Which features of a matrix tensor-parallel ranks have shards of."""


class Multiply(Protocol):
    """x W^T + b, of this rank's shard of W, with the communication that the layer's division takes."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor: ...


class LinearModule(LayoutModule):
    """A layer that is one matrix. Its product may be replaced by another way to compute it (FP8)."""

    cut: Cut
    multiply: Multiply
    weight: Tensor
    """[out, in] of this rank."""


class ColumnParallelLinear(LinearModule):
    """y = x W^T + b with sharded output features: W [out, in], split on dimension 0.

    sections: blocks of output features that each rank holds a share of (2 for gate and up).
    padded: output features in memory over all ranks, if more than out_features; the last ranks' output ends with zeros.
    """

    cut: Cut = "output"
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        bias: bool,
        init: Init,
        sections: int = 1,
        padded: int | None = None,
    ) -> None:
        super().__init__(ctx)
        self.multiply = column_parallel_linear
        split = Split(dim=0, axis="tp", sections=sections)
        filler = {0: padded} if padded not in (None, out_features) else {}
        self.declare("weight", ParameterLayout((out_features, in_features), init, (split,), padded=filler))
        self.declare("bias", ParameterLayout((out_features,), zeros, (split,), padded=filler) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in] (S sharded with sequence parallelism) -> [B, S, out / tp]"""
        return self.multiply(x, self.weight, self.bias, self.ctx)


class RowParallelLinear(LinearModule):
    """y = x W^T + b with sharded input features: W [out, in], split on dimension 1; b is replicated."""

    cut: Cut = "input"
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext, *, bias: bool, init: Init) -> None:
        super().__init__(ctx)
        self.multiply = row_parallel_linear
        self.declare("weight", ParameterLayout((out_features, in_features), init, (Split(dim=1, axis="tp"),)))
        # With sequence parallelism each rank adds the bias to its own positions only.
        layout = ParameterLayout((out_features,), zeros, partial_gradient=sequence_axes(ctx))
        self.declare("bias", layout if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in / tp] -> [B, S, out] (S sharded with sequence parallelism)"""
        return self.multiply(x, self.weight, self.bias, self.ctx)


def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
    """x W^T for this rank's columns of W, summed over tp, then b."""
    if ctx.tp.size == 1:
        return linear(x, weight, bias)
    if ctx.sequence_parallel and ctx.tp_comm_overlap:
        out = _OverlappedRowParallelLinear.apply(x, weight, main_gradient_of(weight), ctx.tp)
    else:
        out = leave_tensor_parallel(linear(x, weight, None), ctx)
    # After the sum: every rank has the whole bias, and would add it tp times before.
    return out if bias is None else out + bias


def leave_tensor_parallel(partial: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum partial results [B, S, H] over tp; with sequence parallelism each rank keeps its shard of S."""
    if ctx.sequence_parallel:
        return reduce_scatter_to(partial, SEQUENCE_DIM, ctx.tp)
    return reduce_from(partial, ctx.tp)


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext, columns: int | None = None
) -> Tensor:
    """x W^T + b for this rank's rows of W; the gradient of x is summed over tp while that of W is computed.

    columns: as of `linear`.
    """
    if ctx.tp.size == 1:
        return linear(x, weight, bias, columns)
    main, overlap = main_gradient_of(weight), ctx.sequence_parallel and ctx.tp_comm_overlap
    return _ColumnParallelLinear.apply(x, weight, bias, main, ctx.tp, ctx.sequence_parallel, overlap, columns)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int | None = None) -> Tensor:
    """x W^T + b on one rank: x [..., in], W [out, in]. The gradient of W goes to its main gradient if it has one.

    columns: of the result, the first ones, where the other rows of W are padding; not with a bias. The product is of
    all rows, and the result a view, [..., columns], whose rows are `out` numbers apart in memory. The gradient of
    padding is 0. With `columns` or a main gradient the result can be differentiated once.
    """
    main = main_gradient_of(weight)
    # Without gradients there is nothing to add to a main gradient: torch's own function serves. With them, autograd
    # would copy the gradient of the first columns into one of all columns.
    if (main is None and columns is None) or not torch.is_grad_enabled():
        return _first_columns(F.linear(x, weight, bias), columns)
    return _Linear.apply(x, weight, bias, main, columns)


def _first_columns(out: Tensor, columns: int | None) -> Tensor:
    # data: autograd forbids to change a view that a Function returns in place, as losses of the user may.
    return out if columns is None else out[..., :columns].data


class _Linear(torch.autograd.Function):
    """x W^T + b on one rank, or its first columns. The backward pass adds dW to the main gradient, if there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main: MainGrad | None, columns: int | None
    ) -> Tensor:
        ctx.main, ctx.has_bias = main, bias is not None
        ctx.save_for_backward(x, weight)
        return _first_columns(F.linear(x, weight, bias), columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wanted = _wanted(ctx)
        dx = _input_gradient(grad, weight) if wanted.x else None
        dweight = _padded_weight_gradient(grad, x, weight, ctx.main) if wanted.weight else None
        dbias = _bias_gradient(grad) if wanted.bias else None
        return dx, dweight, dbias, None, None


class _ColumnParallelLinear(torch.autograd.Function):
    """Forward: (gather S) y = x W^T + b. Backward: dx = dy W, summed over tp and, with a sharded sequence,
    scattered along S; the communication of dx runs while dW = dy^T x is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main: MainGrad | None,
        axis: Axis,
        sequence_parallel: bool,
        overlap: bool,
        columns: int | None,
    ) -> Tensor:
        ctx.main, ctx.axis, ctx.sequence_parallel, ctx.has_bias = main, axis, sequence_parallel, bias is not None
        ctx.save_for_backward(x, weight)  # with sequence parallelism this rank's shard only; backward gathers again
        if overlap:
            assert axis.group is not None
            # Shards are multiplied as they arrive. The gathered input is dropped: the backward pass gathers again.
            _, out = gather_matmul(x.contiguous(), weight.T, SEQUENCE_DIM, axis.group)
            return _first_columns(out if bias is None else out + bias, columns)
        whole = all_gather(x, SEQUENCE_DIM, axis) if sequence_parallel else x  # [B, S, in]
        return _first_columns(F.linear(whole, weight, bias), columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis: Axis = ctx.axis
        wanted = _wanted(ctx)
        # Order of launches: gather x (for dW), dx = dy W, reduce dx, dW = dy^T x. The gather runs beside the first
        # product, the reduction beside the second (Megatron's LinearWithGradAccumulationAndAsyncCommunication).
        dx = dweight = gathered = gathering = reducing = None
        # In a split backward pass the half for x alone needs no gather.
        if ctx.sequence_parallel and wanted.weight:
            gathered, gathering = _start_gather(x, axis)
        if wanted.x:
            dx, reducing = start_sum(_input_gradient(grad, weight), axis, ctx.sequence_parallel)
        if gathering is not None and gathered is not None:
            gathering.wait()
            x = concat_shards(gathered, SEQUENCE_DIM)  # [B, S, in]
        if wanted.weight:
            dweight = _padded_weight_gradient(grad, x, weight, ctx.main)
        dbias = _bias_gradient(grad) if wanted.bias else None
        if reducing is not None:
            reducing.wait()
        return dx, dweight, dbias, None, None, None, None, None


class _OverlappedRowParallelLinear(torch.autograd.Function):
    """Forward: y = x W^T, summed over tp and scattered along S. Backward: dy is gathered, dx = dy W. Both products are
    computed in parts while other parts are communicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main: MainGrad | None, axis: Axis) -> Tensor:
        ctx.main, ctx.axis, ctx.has_bias = main, axis, False
        ctx.save_for_backward(x, weight)
        return matmul_reduce_scatter(x.contiguous(), weight.T, SEQUENCE_DIM, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wanted = _wanted(ctx)
        dx = dweight = None
        if wanted.x:
            # whole: dy of the whole sequence, which dW needs too.
            whole, dx = gather_matmul(grad.contiguous(), weight, SEQUENCE_DIM, ctx.axis.group)
        else:
            whole = all_gather(grad, SEQUENCE_DIM, ctx.axis)
        if wanted.weight:
            dweight = weight_gradient(whole.flatten(0, -2), x.flatten(0, -2), ctx.main)
        return dx, dweight, None, None


@dataclass(frozen=True)
class _Wanted:
    """Which gradients this backward pass is for; a split one computes some first and others later."""

    x: bool
    weight: bool
    bias: bool


def _wanted(ctx: Any) -> _Wanted:
    flags = gradients_wanted(ctx, 3 if ctx.has_bias else 2)
    return _Wanted(flags[0], flags[1], ctx.has_bias and flags[2])


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [..., out or its first columns], weight [out, in] -> [..., in]"""
    # Both products of the backward pass leave padding out. The gaps between rows of the gradient may be as wide, but
    # belong to what made it: they may hold anything, NaN or another tensor, so that they are neither read nor cleared.
    # Rows begin aligned all the same, which is what TMA requires (distances of 16 bytes); sizes may be any.
    return grad @ weight[: grad.shape[-1]]


def _padded_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, main: MainGrad | None) -> Tensor | None:
    """Same as weight_gradient, for grad [..., out or its first columns] and x [..., in]; 0 for other rows of weight."""
    rows, inputs, columns = grad.flatten(0, -2), x.flatten(0, -2), grad.shape[-1]
    if columns == len(weight):
        return weight_gradient(rows, inputs, main)
    if main is not None:
        return weight_gradient(rows, inputs, main.view(lambda total: total[:columns]))
    dweight = torch.empty_like(weight)
    torch.mm(rows.T, inputs, out=dweight[:columns])
    dweight[columns:] = 0.0
    return dweight


def weight_gradient(rows: Tensor, inputs: Tensor, main: MainGrad | None) -> Tensor | None:
    """rows^T inputs: [n, out] and [n, in] -> [out, in], or None after it was added to the main gradient."""
    if main is None:
        return rows.T @ inputs  # [out, in]
    main.add_product(rows, inputs)
    return None


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    """Start the all-gather of the shards, [tp, B, S / tp, H]; it overlaps the computation of dx."""
    shards = empty_shards(x, axis)
    return shards, dist.all_gather_into_tensor(shards.flatten(0, 1), x.contiguous(), group=axis.group, async_op=True)


def start_sum(dx: Tensor, axis: Axis, sequence_parallel: bool) -> tuple[Tensor, dist.Work | None]:
    """Start the all-reduce of x's gradient [B, S, in], or with sequence parallelism the reduce-scatter along S. Returns
    the sum, complete once the handle was waited for."""
    if not sequence_parallel:
        # Collectives read memory in order; the product of a transposed gradient may not be contiguous.
        dx = dx.contiguous()
        return dx, start_all_reduce_(dx, axis)
    shards = split_shards(dx, SEQUENCE_DIM, axis.size)
    shard = shards.new_empty(shards.shape[1:])  # [B, S / tp, in]
    return shard, start_reduce_scatter_into(shard, shards.flatten(0, 1), axis)
