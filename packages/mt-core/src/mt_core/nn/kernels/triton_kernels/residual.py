# mypy: disable-error-code="no-untyped-def"
"""Bias, dropout and residual sum in one pass. The mask is drawn again from its seed in the backward pass, not kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device

_BLOCK = 1024


@triton.jit
def _bias_dropout_add_forward(
    x, bias, residual, y, seed, width, probability, BIAS: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr
):
    """x and residual [rows, width], bias [width], seed [1] -> y = residual + dropout(x + bias). Grid (rows, blocks of
    columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * width + column
    inside = column < width
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        # Philox, by seed and place of the element alone: the backward pass draws the same numbers. The seed is read on
        # the device: as an argument of the launch it would be a host wait. Places count modulo 2^32.
        keep = tl.rand(tl.load(seed), offset.to(tl.uint32)) >= probability
        value = tl.where(keep, value / (1.0 - probability), 0.0)
    tl.store(y + offset, value + tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _bias_dropout_add_backward(dy, dx, seed, width, probability, BLOCK: tl.constexpr):
    """dy [rows, width] -> dx, by the mask of the forward pass."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * width + column
    inside = column < width
    keep = tl.rand(tl.load(seed), offset.to(tl.uint32)) >= probability
    grad = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + offset, tl.where(keep, grad / (1.0 - probability), 0.0), mask=inside)


class _BiasDropoutAdd(torch.autograd.Function):
    """x and residual [..., H], bias [H] or None -> [..., H] in residual's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
        x, residual = x.contiguous(), residual.contiguous()
        y = torch.empty_like(residual)
        # On the device and from its stream: no synchronization, and recomputation replays it.
        seed = torch.randint(2**31 - 1, (1,), device=x.device) if probability > 0 else x
        if x.numel():
            with on_device(x):
                _bias_dropout_add_forward[_grid(x)](
                    x, x if bias is None else bias, residual, y, seed, x.shape[-1], probability,
                    bias is not None, probability > 0, _BLOCK,
                )  # fmt: skip
        ctx.save_for_backward(seed if probability > 0 else None)
        ctx.probability, ctx.dtype = probability, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        (seed,) = ctx.saved_tensors
        dy = grads[0].contiguous()
        # Without dropout dx is dy, and no kernel runs.
        dx = dy.to(ctx.dtype) if seed is None else torch.empty_like(dy, dtype=ctx.dtype)
        if seed is not None and dy.numel():
            with on_device(dy):
                _bias_dropout_add_backward[_grid(dy)](dy, dx, seed, dy.shape[-1], ctx.probability, _BLOCK)
        dbias = None
        if ctx.bias_dtype is not None:
            dbias = dx.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        # The residual's gradient is dy as it came.
        return dx, dbias, dy, None


def _grid(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], triton.cdiv(x.shape[-1], _BLOCK)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
    """Same as mt_core.nn.kernels.reference.layers.bias_dropout_add."""
    return _BiasDropoutAdd.apply(x, None if bias is None else bias.contiguous(), residual, probability)
