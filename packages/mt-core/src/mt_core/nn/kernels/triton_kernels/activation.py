# mypy: disable-error-code="no-untyped-def"
"""Bias and activation in one pass. Backward starts from the input, so nothing else is kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.activations import CLAMP, is_gated
from mt_core.nn.kernels.triton_kernels.launch import on_device

# Columns of a program: 8 elements for each of 128 threads, one 16-byte access in bf16.
_BLOCK = 1024
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_NORMAL_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
# gelu_tanh(x) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), since 0.5 (1 + tanh(u)) = sigmoid(2 u)
_TWO_U = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)
_THREE_CUBE = tl.constexpr(0.134145)  # 3 * 0.044715
_CLAMP = tl.constexpr(CLAMP)
_QUICK = tl.constexpr(1.702)  # quick_gelu(x) = x sigmoid(1.702 x)


@triton.jit
def gate_value(x, NAME: tl.constexpr):
    """The activation of the gate half (swiglu, geglu, geglu_tanh, clamped_swiglu) or of everything (squared_relu)."""
    # The names are compared while Triton compiles: each activation is a kernel without branches.
    if NAME == "swiglu":
        result = x * tl.sigmoid(x)
    elif NAME == "geglu":
        result = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "geglu_tanh":
        # By a sigmoid, which is one exponential and saturates without overflow; Triton's language has no tanh.
        result = x * tl.sigmoid(x * (x * x * _CUBE + 1.0) * _TWO_U)
    elif NAME == "clamped_swiglu":
        clamped = tl.minimum(x, _CLAMP)
        result = clamped * tl.sigmoid(clamped * _QUICK)
    else:
        positive = tl.maximum(x, 0.0)
        result = positive * positive
    return result


@triton.jit
def gate_slope(x, NAME: tl.constexpr):
    """Its derivative."""
    if NAME == "swiglu":
        # (x s)' = s (1 + x (1 - s)) for s = sigmoid(x)
        gate = tl.sigmoid(x)
        result = gate * (1.0 + x * (1.0 - gate))
    elif NAME == "geglu":
        # (x Phi(x))' = Phi(x) + x phi(x), the normal distribution and its density
        result = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _NORMAL_DENSITY * tl.exp(-0.5 * x * x)
    elif NAME == "geglu_tanh":
        gate = tl.sigmoid(x * (x * x * _CUBE + 1.0) * _TWO_U)
        inner = (x * x * _THREE_CUBE + 1.0) * _TWO_U  # d(2 u) / dx
        result = gate * (1.0 + x * (1.0 - gate) * inner)
    elif NAME == "clamped_swiglu":
        gate = tl.sigmoid(x * _QUICK)
        # At the limit itself the gradient passes, as in the backward pass of torch.clamp.
        result = tl.where(x <= _CLAMP, gate * (1.0 + x * (1.0 - gate) * _QUICK), 0.0)
    else:
        result = 2.0 * tl.maximum(x, 0.0)
    return result


@triton.jit
def up_factor(up, NAME: tl.constexpr):
    """What the activation of the gate half is multiplied by."""
    if NAME == "clamped_swiglu":
        up = tl.minimum(tl.maximum(up, -_CLAMP), _CLAMP) + 1.0
    return up


@triton.jit
def through_factor(grad, up, NAME: tl.constexpr):
    """The gradient of `up` from that of up_factor(up)."""
    if NAME == "clamped_swiglu":
        grad = tl.where(tl.abs(up) <= _CLAMP, grad, 0.0)
    return grad


@triton.jit
def _activation_forward(
    x, bias, y, width, NAME: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """x [rows, width], gated [rows, 2 width]; bias of one row or unused -> y [rows, width]. Grid (rows, blocks of
    columns)."""
    # int64: offsets pass 2^31 for many rows.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # A gated row is [gate half | up half], 2 * width long.
    source = x + row * width * (2 if GATED else 1) + column
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = gate_value(value, NAME)
    if GATED:
        up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(bias + width + column, mask=inside, other=0.0).to(tl.float32)
        result *= up_factor(up, NAME)
    tl.store(y + row * width + column, result, mask=inside)


@triton.jit
def _activation_backward(
    dy, x, bias, dx, width, NAME: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """dy [rows, width]; x, bias as in the forward pass -> dx as x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    offset = row * width * (2 if GATED else 1) + column
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + offset + width, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(bias + width + column, mask=inside, other=0.0).to(tl.float32)
        # The up half first: `grad` becomes that of the gate half below.
        tl.store(dx + offset + width, through_factor(grad * gate_value(value, NAME), up, NAME), mask=inside)
        grad *= up_factor(up, NAME)
    tl.store(dx + offset, grad * gate_slope(value, NAME), mask=inside)


class _Activation(torch.autograd.Function):
    """x [..., F], gated [..., 2F], bias of its last dimension or None -> [..., F] in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, name: str) -> Tensor:
        # x is kept, not the activation: the product before has written it already.
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if is_gated(name) else 1))
        ctx.save_for_backward(x, bias)
        ctx.name = name
        if y.numel():
            with on_device(x):
                _activation_forward[_grid(y)](x, x if bias is None else bias, y, y.shape[-1], *_flags(name, bias))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        dx, dy = torch.empty_like(x), grads[0].contiguous()
        if dy.numel():
            with on_device(x):
                _activation_backward[_grid(dy)](
                    dy, x, x if bias is None else bias, dx, dy.shape[-1], *_flags(ctx.name, bias)
                )
        # dbias is the sum over rows of dx, which torch takes in fp32 and in a fixed order.
        dbias = None if bias is None else dx.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, dbias, None


def _grid(y: Tensor) -> tuple[int, int]:
    # Rows first: the second dimension of a CUDA grid is limited to 65,535.
    return y.numel() // y.shape[-1], triton.cdiv(y.shape[-1], _BLOCK)


def _flags(name: str, bias: Tensor | None) -> tuple[str, bool, bool, int]:
    return name, is_gated(name), bias is not None, _BLOCK


def activation(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """Same as mt_core.nn.kernels.reference.layers.activation."""
    return _Activation.apply(x, None if bias is None else bias.contiguous(), name)


# -- activation times a weight of each row, as experts have it --------------------------------------------
#
# In one pass. Backward starts from the inputs, so nothing else is kept; it computes the gradients of both in one pass.

_WEIGHTED_BLOCK = 1024


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
            grid = (len(y), triton.cdiv(y.shape[1], _WEIGHTED_BLOCK))
            with on_device(x):
                _weighted_activation_forward[grid](x, weights, y, y.shape[1], name, is_gated(name), _WEIGHTED_BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        dx, dweights, dy = torch.empty_like(x), torch.empty_like(weights), grads[0].contiguous()
        if dy.numel():
            with on_device(x):
                _weighted_activation_backward[(len(dy),)](
                    dy, x, weights, dx, dweights, dy.shape[1], ctx.name, is_gated(ctx.name), _WEIGHTED_BLOCK
                )
        return dx, dweights, None


def weighted_activation(x: Tensor, weights: Tensor, name: str) -> Tensor:
    """x [R, F], for gated activations [R, 2F]; weights [R] -> [R, F] in the dtype of x"""
    return _WeightedActivation.apply(x, weights, name)
