"""A gated feed-forward in FP8 as one autograd function: its activation and the gradient of that exist in FP8 alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from mt_core._torch_compat import gradients_wanted
from mt_core.nn.activations import FUSED, is_gated
from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.fp8.multiply import Fp8Multiply, LayerCall, SavedProduct, backward_products, forward_product
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.fp8_casts import Activated
from mt_core.nn.kernels.reference.layers import FusedActivation
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class Fp8FeedForward:
    """linear_fc2(activation(linear_fc1(x))) of a DenseFeedForward, with the casts of its layers.

    The activation is computed by the casts that read it, forward for the second product, and where a scale belongs to a
    row or a block again for the gradient of the second weight. Backward the casts compute the gradient of its input.
    """

    first: Fp8Multiply
    second: Fp8Multiply
    activation: FusedActivation

    def __call__(self, x: Tensor, fc1: ColumnParallelLinear, fc2: RowParallelLinear) -> Tensor:
        calls = self.first.call(fc1.weight, fc1.ctx), self.second.call(fc2.weight, fc2.ctx)
        out = _Fp8FeedForward.apply(x, fc1.weight, fc2.weight, *calls, self.activation)
        return self.second.leave(out, fc2.bias, fc2.ctx)


class _Fp8FeedForward(torch.autograd.Function):
    """x [..., in], weight1 [2F, in] and weight2 [out, F] of this rank -> [..., out]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        first: LayerCall,
        second: LayerCall,
        name: FusedActivation,
    ) -> Tensor:
        # inner: [..., 2F]
        inner, saved1 = forward_product(x.flatten(0, -2), x.shape, weight1, first, ctx.needs_input_grad[1])
        # Not computed here: the cast for the second product computes it tile by tile.
        activated = Activated(inner.flatten(0, -2), name)
        out, saved2 = forward_product(activated, inner.shape, weight2, second, ctx.needs_input_grad[2])
        ctx.save_for_backward(inner, *saved1, *saved2)
        ctx.first, ctx.second, ctx.name, ctx.shape = first, second, name, x.shape
        ctx.first_half = None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner, *saved = ctx.saved_tensors
        saved1, saved2 = SavedProduct(*saved[:4]), SavedProduct(*saved[4:])  # four tensors each
        rows, grad = inner.flatten(0, -2), grads[0]
        if saved2.scale is None:  # a scale of the whole matrix belongs to its cast, which was kept
            # Scales by row or block: the casts of the backward pass compute the activation again, along the other
            # dimension.
            saved2 = saved2._replace(kept=Activated(rows, ctx.name))
        wants_x, wants_first, wants_second = gradients_wanted(ctx, 3)
        needs_dinner = wants_x or wants_first
        # Schedules that split the backward pass (zero bubble) call it twice with the same gradient: first for x, then
        # for the weights.
        dinner = ctx.first_half.inner_gradient(grad) if ctx.first_half is not None else None
        wanted = (needs_dinner and dinner is None, wants_second)
        computed, dweight2 = backward_products(grad.flatten(0, -2), inner.shape, saved2, ctx.second, wanted)
        dinner = computed if dinner is None else dinner
        # Used once, then freed.
        dx = dweight1 = ctx.first_half = None
        if dinner is not None and needs_dinner:
            gradient = Activated(rows, ctx.name, dinner.flatten(0, -2))  # [rows, 2F], computed by its casts
            dx, dweight1 = backward_products(gradient, ctx.shape, saved1, ctx.first, (wants_x, wants_first))
            # The values of a tensor of inference mode, which has no version, may change unseen.
            # The weight needs a gradient, but not in this pass: its half follows.
            if ctx.needs_input_grad[1] and not wants_first and not grad.is_inference():
                ctx.first_half = _FirstHalf(grad, dinner)
        return dx, dweight1, dweight2, None, None, None


class _FirstHalf:
    """The gradient of `inner` from the half of a split backward pass that is for x: the half for the weights, which is
    given the same gradient of the output, does not repeat the product. It is freed with that gradient."""

    def __init__(self, grad: Tensor, dinner: Tensor) -> None:
        # By identity of the tensor, not by its values.
        self._computed = WeakTensorKeyDictionary({grad: (grad._version, dinner)})

    def inner_gradient(self, grad: Tensor) -> Tensor | None:
        """None for another gradient of the output, or the same tensor with other values."""
        entry = self._computed.get(grad)
        return entry[1] if entry is not None and entry[0] == grad._version else None


def join_activations(layer: nn.Module, kernels: Kernels) -> None:
    """Have the dense feed-forwards of a layer do so whose two products are in FP8, where the casts and the activation
    are of one implementation that can."""
    if kernels.pick_fused("fp8_cast", joined="activation") is None:
        return
    for module in layer.modules():
        if isinstance(module, DenseFeedForward):
            module.joined = _joined(module)


def _joined(module: DenseFeedForward) -> Fp8FeedForward | None:
    """None: the activation has no such form, dropout is behind it, or a gradient is needed in 16 bits."""
    if module.dropout is not None:
        return None
    first, second = module.linear_fc1.multiply, module.linear_fc2.multiply
    if not isinstance(first, Fp8Multiply) or not isinstance(second, Fp8Multiply):
        return None
    # A bias of the first layer needs the gradient of its product in 16 bits, which is never written here.
    in_fp8 = first.wgrad_in_fp8 and second.wgrad_in_fp8 and module.linear_fc1.bias is None
    if not in_fp8 or not is_gated(module.activation) or module.activation not in FUSED:
        return None
    return Fp8FeedForward(first, second, cast(FusedActivation, module.activation))
