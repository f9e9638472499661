"""activation(inner) * weights, applied between the two matrices of each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Activation
from mt_core.nn.activations import FUSED, activate
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.request import Feature

WeightedActivation = Callable[[Tensor, Tensor], Tensor]
"""(inner [R, F], for gated activations [R, 2F]; weights [R]) -> [R, F], in the dtype of `inner`"""

TILE_ELEMENTS = 32768
"""Elements of a [rows, F] tile per thread: few enough that intermediates stay in the core's cache, enough that the
call overhead is small. The fastest of 2^14 to 2^17, measured for F of 256 and of 1024."""


def plain_activation(name: Activation, device_type: str) -> WeightedActivation:
    """The plain torch implementation for the device."""
    if name == "swiglu" and device_type in ("cpu", "meta"):  # what is planned keeps no more than what is run
        return tiled_swiglu
    return partial(weighted, partial(activate, name))


def pick_activation(name: Activation, device_type: str, kernels: Kernels) -> WeightedActivation:
    """The implementation that [kernels] selects. Raises ConfigError if it cannot run here."""
    plain = plain_activation(name, device_type)
    if name not in FUSED:
        return plain
    feature = cast(Feature, name)
    function = kernels.pick("activation", feature, plain=activate)
    if function is activate:
        return plain
    in_one_pass = cast(Callable[..., Tensor] | None, kernels.pick_fused("activation", feature))
    if in_one_pass is not None:
        return lambda inner, weights: in_one_pass(inner, weights, name)
    return partial(weighted, lambda inner: function(inner, None, name))


def weighted(function: Callable[[Tensor], Tensor], inner: Tensor, weights: Tensor) -> Tensor:
    """One operation after another: each reads and writes memory."""
    return (function(inner) * weights[:, None]).to(inner.dtype)


def tiled_swiglu(inner: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weights, computed one tile of rows at a time in the wider dtype of the two. Only the inputs are
    saved for the backward pass."""
    return _TiledSwiglu.apply(inner, weights)


class _TiledSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(inner, weights)
        out = inner.new_empty(len(inner), inner.shape[1] // 2)
        for rows in _tiles(out):
            gate, up = _halves(inner[rows], weights.dtype)
            # The product is rounded to the dtype of `out` once, at the end.
            torch.mul(F.silu(gate).mul_(up), weights[rows, None], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inner, weights = ctx.saved_tensors
        d_inner, d_weights = torch.empty_like(inner), torch.empty_like(weights)
        scratch = _Scratch(inner, weights)
        for rows in _tiles(grads[0]):
            gate, up = _halves(inner[rows], weights.dtype)
            scratch.differentiate(gate, up, weights[rows], grads[0][rows], d_inner[rows], d_weights[rows])
        return d_inner, d_weights


class _Scratch:
    """One buffer per intermediate value, reused by all tiles: it stays in the cache, which new tensors would not."""

    def __init__(self, inner: Tensor, weights: Tensor) -> None:
        width = inner.shape[1] // 2
        size = min(len(inner), _tile_rows(inner, width))
        dtype = torch.promote_types(inner.dtype, weights.dtype)
        self.tiles = [inner.new_empty(size, width, dtype=dtype) for _ in range(4)]
        self.one = self.tiles[0].new_ones(())

    def differentiate(
        self, gate: Tensor, up: Tensor, weights: Tensor, grad: Tensor, d_inner: Tensor, d_weights: Tensor
    ) -> None:
        """Gradients of silu(gate) * up * weights [rows, F], written to d_inner [rows, 2F] and d_weights [rows]."""
        # The last tile may have fewer rows.
        sigmoid, silu, other, weighted_grad = (tile[: len(gate)] for tile in self.tiles)
        d_gate, d_up = d_inner.chunk(2, 1)
        torch.sigmoid(gate, out=sigmoid)
        torch.mul(gate, sigmoid, out=silu)
        torch.mul(grad, silu, out=other)
        # d_weights = sum over F of grad * silu(gate) * up
        torch.sum(other.mul_(up), 1, out=d_weights)
        torch.mul(grad, weights[:, None], out=weighted_grad)
        # d_up = grad * weights * silu(gate)
        torch.mul(weighted_grad, silu, out=d_up)
        torch.sub(self.one, sigmoid, out=other)
        slope = other.mul_(silu).add_(sigmoid)  # of silu: sigmoid + silu (1 - sigmoid)
        # d_gate = grad * weights * up * silu'(gate)
        torch.mul(weighted_grad.mul_(up), slope, out=d_gate)


def _tiles(x: Tensor) -> Iterator[slice]:
    """Splits x [R, F] into tiles of consecutive rows."""
    size = _tile_rows(x, x.shape[1])
    return (slice(first, first + size) for first in range(0, len(x), size))


def _tile_rows(x: Tensor, width: int) -> int:
    """Rows of x [R, ...] per tile: all of them on the meta device, which computes nothing."""
    if x.is_meta:
        return max(1, len(x))
    return max(1, TILE_ELEMENTS * torch.get_num_threads() // max(1, width))


def _halves(inner: Tensor, at_least: torch.dtype) -> tuple[Tensor, Tensor]:
    gate, up = inner.to(torch.promote_types(inner.dtype, at_least)).chunk(2, 1)
    return gate, up
