"""Rounding in the forward pass whose gradient is that of no rounding (Bengio et al., 2013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_core.nn.main_grad import main_gradient_of


class _StraightThrough(torch.autograd.Function):
    """(x, rounded) -> rounded, whose gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        # A gradient that the product has added to the main gradient stays None: the node of the weight sees it so.
        ctx.set_materialize_grads(False)
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return grads[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The values of `rounded`, with the gradient, and the main gradient, of x."""
    result = _StraightThrough.apply(x, rounded)
    assert isinstance(result, Tensor)
    main = main_gradient_of(x)
    if main is not None:
        result.main_grad = main  # type: ignore[attr-defined]
    return result
