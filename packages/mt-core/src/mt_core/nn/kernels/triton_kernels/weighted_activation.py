# mypy: disable-error-code="no-untyped-def"
"""Activation times a weight of each row, as experts have it, in one pass. Backward starts from the inputs, so nothing
else is kept; it computes the gradients of both in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.activations import is_gated
from mt_core.nn.kernels.triton_kernels.activation import gate_slope, gate_value, through_factor, up_factor
from mt_core.nn.kernels.triton_kernels.launch import on_device

_BLOCK = 1024


@triton.jit
def _weighted_activation_forward(x, weights, y, width, NAME: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, width], gated [rows, 2 width]; weights [rows] -> y [rows, width]. Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = x + row * width * (2 if GATED else 1) + column
    result = gate_value(tl.load(source, mask=inside, other=0.0).to(tl.float32), NAME)
    if GATED:
        result *= up_factor(tl.load(source + width, mask=inside, other=0.0).to(tl.float32), NAME)
    # Rounded once, after the weight; separate operations round the activation first.
    tl.store(y + row * width + column, result * tl.load(weights + row).to(tl.float32), mask=inside)


@triton.jit
def _weighted_activation_backward(
    dy, x, weights, dx, dweights, width, NAME: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """One row, a block of columns at a time: the gradient of its weight is a sum over all of them."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    x += row * width * (2 if GATED else 1)
    dx += row * width * (2 if GATED else 1)
    # One program has the whole row, so the weight's gradient needs neither atomics nor a second launch.
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate_value(gate, NAME)
        if GATED:
            up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
            # y = weight gate_value(gate) up_factor(up): each gradient has the two other factors.
            tl.store(dx + width + column, through_factor(grad * weight * value, up, NAME), mask=inside)
            grad *= up_factor(up, NAME)
        # grad is dy * up_factor(up) here, or dy where the activation is not gated.
        total += grad * value
        tl.store(dx + column, grad * weight * gate_slope(gate, NAME), mask=inside)
    tl.store(dweights + row, tl.sum(total, 0))


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, name: str) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        y = x.new_empty(len(x), x.shape[1] // (2 if is_gated(name) else 1))
        ctx.save_for_backward(x, weights)
        ctx.name = name
        if y.numel():
            grid = (len(y), triton.cdiv(y.shape[1], _BLOCK))
            with on_device(x):
                _weighted_activation_forward[grid](x, weights, y, y.shape[1], name, is_gated(name), _BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        dx, dweights, dy = torch.empty_like(x), torch.empty_like(weights), grads[0].contiguous()
        if dy.numel():
            with on_device(x):
                _weighted_activation_backward[(len(dy),)](
                    dy, x, weights, dx, dweights, dy.shape[1], ctx.name, is_gated(ctx.name), _BLOCK
                )
        return dx, dweights, None


def weighted_activation(x: Tensor, weights: Tensor, name: str) -> Tensor:
    """x [R, F], for gated activations [R, 2F]; weights [R] -> [R, F] in the dtype of x"""
    return _WeightedActivation.apply(x, weights, name)
