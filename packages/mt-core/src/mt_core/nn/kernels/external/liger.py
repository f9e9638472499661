"""Liger-Kernel: norms, rotary embedding, activations, cross entropy."""

from __future__ import annotations

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor

from mt_core.parallel.context import Axis


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """The casting mode "gemma" keeps all of it in fp32, as the reference does."""
    return LigerRMSNormFunction.apply(x, weight, eps, 1.0 if zero_centered else 0.0, "gemma", False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Liger takes [B, N, S, D], turns in place, and takes the angles of both halves, [B or 1, S, D]."""
    cos, sin = (angles[:, :, 0].repeat(1, 1, 2).to(q.dtype) for angles in (cos, sin))
    # clone: queries and keys are views of one product, which the kernel would overwrite.
    turned_q, turned_k = LigerRopeFunction.apply(q.clone().transpose(1, 2), k.clone().transpose(1, 2), cos, sin)
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2)


def activation(x: Tensor, bias: None, name: str) -> Tensor:
    """Liger's GEGLU is the one with tanh. Its gated backward writes over its inputs, so they are copies."""
    if name == "squared_relu":
        return LigerReLUSquaredFunction.apply(x)
    gate, up = (half.contiguous() for half in x.chunk(2, -1))
    return (LigerSiLUMulFunction if name == "swiglu" else LigerGELUMulFunction).apply(gate, up)


def cross_entropy(logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool = False) -> Tensor:
    """Liger writes the gradient over its input in the forward pass."""
    overwritten = logits if overwrite else logits.clone()
    # ignore_index -100, no z-loss (lse_square_scale), no label smoothing, a loss for each token.
    losses = LigerCrossEntropyFunction.apply(overwritten, columns, None, -100, 0.0, 0.0, "none")
    return losses[0] if isinstance(losses, tuple) else losses
