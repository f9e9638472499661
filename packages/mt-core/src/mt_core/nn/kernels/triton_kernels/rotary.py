# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries and keys in one launch: a program turns all heads of one token."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device


@triton.jit
def _turn(
    source, target, heads, head_stride, cos, sin, half, head_dim,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The heads of one token: source with its own head stride, target [heads, head_dim] contiguous."""
    pair = tl.arange(0, HALF)
    both = tl.arange(0, 2 * HALF)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        row = source + head[:, None] * head_stride
        out = target + head[:, None] * head_dim
        if INTERLEAVED:
            # Neighbours are loaded together and taken apart in registers.
            inside = (head < heads)[:, None] & (both < 2 * half)[None, :]
            value = tl.load(row + both[None, :], mask=inside, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(value, [HEADS, HALF, 2]))
            turned = tl.join(a * cos[None, :] - b * sin[None, :], a * sin[None, :] + b * cos[None, :])
            tl.store(out + both[None, :], tl.reshape(turned, [HEADS, 2 * HALF]), mask=inside)
        else:
            inside = (head < heads)[:, None] & (pair < half)[None, :]
            a = tl.load(row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            b = tl.load(row + half + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(out + pair[None, :], a * cos[None, :] - b * sin[None, :], mask=inside)
            tl.store(out + half + pair[None, :], a * sin[None, :] + b * cos[None, :], mask=inside)
        if REST > 0:
            rest = 2 * half + tl.arange(0, REST)
            passing = (head < heads)[:, None] & (rest < head_dim)[None, :]
            tl.store(out + rest[None, :], tl.load(row + rest[None, :], mask=passing), mask=passing)


@triton.jit
def _rotary(
    q, k, q_out, k_out, cos, sin, sequence, q_heads, k_heads, half, head_dim,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, angle_batch_stride,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    pair = tl.arange(0, HALF)
    angle = batch * angle_batch_stride + position * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    q_row = q + batch * q_batch_stride + position * q_token_stride
    k_row = k + batch * k_batch_stride + position * k_token_stride
    q_target = q_out + token * q_heads * head_dim
    k_target = k_out + token * k_heads * head_dim
    _turn(q_row, q_target, q_heads, q_head_stride, c, s, half, head_dim, INTERLEAVED, Q_HEADS, HALF, REST)
    _turn(k_row, k_target, k_heads, k_head_stride, c, s, half, head_dim, INTERLEAVED, K_HEADS, HALF, REST)


_HEADS = 32
"""Heads of a tile at most."""


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    """New contiguous tensors; inverse turns back, which is the gradient."""
    # Lists: torch.compile cannot trace generators in an autograd function.
    q, k = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k)]
    turned_q, turned_k = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    batch, sequence, q_heads, head_dim = q.shape
    k_heads, half = k.shape[2], cos.shape[-1]
    if batch * sequence:
        rest = head_dim - 2 * half
        with on_device(q):
            _rotary[(batch * sequence,)](
                q, k, turned_q, turned_k, cos, sin, sequence, q_heads, k_heads, half, head_dim,
                *q.stride()[:3], *k.stride()[:3], sequence * half if cos.shape[0] > 1 else 0,
                inverse, interleaved,
                min(triton.next_power_of_2(q_heads), _HEADS), min(triton.next_power_of_2(k_heads), _HEADS),
                triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(rest) if rest else 0,
            )  # fmt: skip
    return turned_q, turned_k


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _launch(q, k, cos, sin, interleaved, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dq, dk = _launch(grads[0], grads[1], cos, sin, ctx.interleaved, inverse=True)
        return dq, dk, None, None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """As mt_core.nn.kernels.reference.rotary."""
    turned: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos.contiguous(), sin.contiguous(), interleaved)
    return turned
