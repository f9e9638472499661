# mypy: disable-error-code="no-untyped-def"
"""Scale, mask and softmax in one pass over the scores; no mask of their size is built for causality."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import WIDE_BLOCK, on_device, warps_for

WIDEST_BACKWARD = 16384
"""Keys that a program of the backward pass holds in registers; from the next power of two on they spill."""


@triton.jit
def _softmax_forward(
    scores, mask, weights, scale, heads, queries, keys, mask_batch, mask_head, mask_query,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mask_*: strides of the mask, 0 where it is broadcast."""
    # One row of scores [batch, head, query] to a program; int64, as rows * keys passes 2^31 for long sequences.
    row = tl.program_id(0).to(tl.int64)
    query, head, batch = row % queries, (row // queries) % heads, row // (queries * heads)
    key = tl.arange(0, BLOCK)
    seen = key < keys
    if CAUSAL:
        # The queries are the last of the positions: keys - queries of them are in a cache.
        seen = seen & (key <= query + keys - queries)
    if MASK:
        allowed = mask + batch * mask_batch + head * mask_head + query * mask_query + key
        seen = seen & (tl.load(allowed, mask=key < keys, other=0) != 0)
    # Hidden scores are loaded too: with the mask of a triangle every load would be of a single element.
    value = tl.load(scores + row * keys + key, mask=key < keys, other=0.0).to(tl.float32) * scale
    value = tl.where(seen, value, float("-inf"))
    largest = tl.max(value, 0)
    # A row that sees no key has the maximum -inf, and -inf - -inf is NaN.
    powers = tl.exp(value - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(powers, 0)
    # A row that sees no key has the total 0.
    tl.store(weights + row * keys + key, powers / tl.where(total == 0.0, 1.0, total), mask=key < keys)


@triton.jit
def _softmax_backward(dweights, weights, dscores, scale, keys, BLOCK: tl.constexpr):
    """dweights and weights [rows, keys] -> dscores. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    # d scores = scale P (dP - sum(P dP)). Hidden keys have P = 0, so the mask is not needed again.
    key = tl.arange(0, BLOCK)
    weight = tl.load(weights + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)
    grad = tl.load(dweights + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)
    mean = tl.sum(weight * grad, 0)
    tl.store(dscores + row * keys + key, scale * weight * (grad - mean), mask=key < keys)


@triton.jit
def _softmax_backward_by_columns(dweights, weights, dscores, scale, keys, BLOCK: tl.constexpr):
    """Same as _softmax_backward, for a row wider than the registers: it is read again from the cache."""
    row = tl.program_id(0).to(tl.int64)
    # fp32 for each lane, reduced once behind the loop.
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)
        products += weight * tl.load(dweights + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)
    mean = tl.sum(products, 0)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)
        grad = tl.load(dweights + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)
        tl.store(dscores + row * keys + key, scale * weight * (grad - mean), mask=key < keys)


class _ScaledMaskedSoftmax(torch.autograd.Function):
    """scores [B, N, S, T], mask bool of a shape that is broadcast to it or None -> the same, in scores' dtype."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
        scores = scores.contiguous()
        _, heads, queries, keys = scores.shape
        weights = torch.empty_like(scores)
        if scores.numel():
            block = triton.next_power_of_2(keys)
            # expand() gives broadcast dimensions the stride 0: no mask of the scores' size is stored.
            seen = scores if mask is None else mask.expand(scores.shape).view(torch.uint8)
            strides = (0, 0, 0) if mask is None else seen.stride()[:3]
            with on_device(scores):
                _softmax_forward[(scores.numel() // keys,)](
                    scores, seen, weights, scale, heads, queries, keys, *strides, mask is not None, causal, block,
                    num_warps=warps_for(block),
                )  # fmt: skip
        # The result alone: the scores are not needed for the gradient.
        ctx.save_for_backward(weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (weights,) = ctx.saved_tensors
        dscores = torch.empty_like(weights)
        if weights.numel():
            keys = weights.shape[-1]
            is_wide = keys > WIDEST_BACKWARD
            kernel = _softmax_backward_by_columns if is_wide else _softmax_backward
            block = WIDE_BLOCK if is_wide else triton.next_power_of_2(keys)
            with on_device(weights):
                kernel[(weights.numel() // keys,)](
                    grads[0].contiguous(), weights, dscores, ctx.scale, keys, block, num_warps=warps_for(block)
                )
        return dscores, None, None, None


def scaled_masked_softmax(scores: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Same as mt_core.nn.kernels.reference.layers.scaled_masked_softmax."""
    # The kernel steps through keys one element at a time.
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    return _ScaledMaskedSoftmax.apply(scores, scale, mask, causal)
