"""Transformer Engine 2: norms, activations, cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

from mt_core.parallel.context import Axis

_ALL_MULTIPROCESSORS = 0
"""Multiprocessors that a norm leaves to others."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        dtype = TE_DType[x.dtype]
        # No output buffer and no quantizer: y is new, in the dtype of x. RMSNorm has no mean, in whose place None is
        # returned.
        y, _, rstd = tex.rmsnorm_fwd(rows, weight, eps, None, None, dtype, _ALL_MULTIPROCESSORS, zero_centered)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, rstd = ctx.saved_tensors
        dy = grads[0].reshape(rows.shape).contiguous()
        dx, dweight = tex.rmsnorm_bwd(dy, rows, rstd, weight, _ALL_MULTIPROCESSORS, ctx.zero_centered)
        return dx.view(grads[0].shape), dweight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        dtype = TE_DType[x.dtype]
        y, mean, rstd = tex.layernorm_fwd(
            rows, weight, bias, eps, None, None, dtype, _ALL_MULTIPROCESSORS, zero_centered
        )
        ctx.save_for_backward(rows, weight, mean, rstd)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rows, weight, mean, rstd = ctx.saved_tensors
        dy = grads[0].reshape(rows.shape).contiguous()
        dx, dweight, dbias = tex.layernorm_bwd(dy, rows, mean, rstd, weight, _ALL_MULTIPROCESSORS, ctx.zero_centered)
        return dx.view(grads[0].shape), dweight, dbias, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return _RMSNorm.apply(x, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, eps, zero_centered)


def _activation_pair(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(forward, backward); Transformer Engine's geglu is the one with tanh, its srelu the squared ReLU."""
    return {
        "swiglu": (tex.swiglu, tex.dswiglu),
        "geglu_tanh": (tex.geglu, tex.dgeglu),
        "squared_relu": (tex.srelu, tex.dsrelu),
    }[name]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.name = name
        return _activation_pair(name)[0](x, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _activation_pair(ctx.name)[1](grads[0].contiguous(), x, None), None


def activation(x: Tensor, bias: None, name: str) -> Tensor:
    return _Activation.apply(x, name)


def cross_entropy(logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool = False) -> Tensor:
    """Transformer Engine counts labels over the whole vocabulary, and writes the gradient over its input."""
    # columns count from this rank's first id.
    labels = columns + axis.rank * logits.shape[-1]
    overwritten = logits if overwrite else logits.clone()
    return parallel_cross_entropy(overwritten[None], labels[None], 0.0, False, axis.group)[0]
