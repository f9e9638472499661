"""Short depthwise causal convolution as a sum of shifted inputs, with its gradients by hand.

conv1d takes channels before positions, and a decoder has positions before channels: on a CPU it spends most of its time
on copies from one order to the other, forward and backward. A few taps are as many passes over the input as it is.

Shapes: B batch, S positions, C channels, k taps; the last tap is applied to the position itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST_TAPS = 8
"""Above it the passes over the input take longer than the copies."""


def can_shift(x: Tensor, weight: Tensor) -> bool:
    """Whether `shifted_conv` serves: on a CPU, without rounding after each tap to fewer bits than conv1d sums in."""
    exact = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    return x.device.type == "cpu" and exact and weight.shape[1] <= MOST_TAPS


def shifted_conv(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, S, C], weight [C, k] -> [B, S, C], with zeros before the first position. Its gradients cannot be
    differentiated again."""
    y: Tensor = _ShiftedConv.apply(x, weight)
    return y


class _ShiftedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        # From the first tap to the last, as conv1d sums them.
        for distance in reversed(_distances(x, weight)):
            y[:, distance:].addcmul_(x[:, :-distance], weight[:, -1 - distance])
        return y.addcmul_(x, weight[:, -1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        dx, dweight = dy * weight[:, -1], torch.zeros_like(weight)
        dweight[:, -1] = (dy * x).sum((0, 1))
        for distance in _distances(x, weight):
            later, earlier = dy[:, distance:], x[:, :-distance]
            dx[:, :-distance].addcmul_(later, weight[:, -1 - distance])
            dweight[:, -1 - distance] = (later * earlier).sum((0, 1))
        return dx, dweight


def _distances(x: Tensor, weight: Tensor) -> range:
    """From a position to those before it that it sees."""
    return range(1, min(weight.shape[1], x.shape[1]))
