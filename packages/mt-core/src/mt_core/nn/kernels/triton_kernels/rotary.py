# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries and keys in one launch: a program turns all heads of one token."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device


@triton.jit
def _place(head, per_group, head_stride, group_stride):
    return (head // per_group) * group_stride + (head % per_group) * head_stride


@triton.jit
def _turn(
    source, target, heads, per_group, source_head, source_group, target_head, target_group, cos, sin, half, head_dim,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The heads of one token, in groups: source and target with strides of heads and of groups of their own."""
    pair = tl.arange(0, HALF)
    both = tl.arange(0, 2 * HALF)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        row = source + _place(head, per_group, source_head, source_group)[:, None]
        out = target + _place(head, per_group, target_head, target_group)[:, None]
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
def _copy(source, target, heads, source_head, target_head, head_dim, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    channel = tl.arange(0, WIDTH)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (channel < head_dim)[None, :]
        value = tl.load(source + head[:, None] * source_head + channel[None, :], mask=inside)
        tl.store(target + head[:, None] * target_head + channel[None, :], value, mask=inside)


@triton.jit
def _angle(cos, sin, offset, half, INVERSE: tl.constexpr, HALF: tl.constexpr):
    pair = tl.arange(0, HALF)
    c = tl.load(cos + offset + pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + offset + pair, mask=pair < half, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    return c, s


@triton.jit
def _rotary(
    q, k, q_out, k_out, cos, sin, sequence, q_heads, k_heads, half, head_dim,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, angle_batch_stride,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    c, s = _angle(cos, sin, batch * angle_batch_stride + position * half, half, INVERSE, HALF)
    q_row = q + batch * q_batch_stride + position * q_token_stride
    k_row = k + batch * k_batch_stride + position * k_token_stride
    q_target = q_out + token * q_heads * head_dim
    k_target = k_out + token * k_heads * head_dim
    _turn(
        q_row, q_target, q_heads, q_heads, q_head_stride, 0, head_dim, 0, c, s, half, head_dim,
        INTERLEAVED, Q_HEADS, HALF, REST,
    )  # fmt: skip
    _turn(
        k_row, k_target, k_heads, k_heads, k_head_stride, 0, head_dim, 0, c, s, half, head_dim,
        INTERLEAVED, K_HEADS, HALF, REST,
    )  # fmt: skip


@triton.jit
def _rotary_of_qkv(
    qkv, q, k, v, cos, sin, sequence, groups, per_group, half, head_dim, angle_batch_stride,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """From qkv to q, k and v, all contiguous; backward from the gradients of these to that of qkv, turned back."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    c, s = _angle(cos, sin, batch * angle_batch_stride + position * half, half, BACKWARD, HALF)
    group = (per_group + 2) * head_dim
    queries = qkv + token * groups * group
    keys = queries + per_group * head_dim
    values = keys + head_dim
    own_group = per_group * head_dim
    q_row = q + token * groups * own_group
    k_row = k + token * groups * head_dim
    v_row = v + token * groups * head_dim
    if BACKWARD:
        _turn(
            q_row, queries, groups * per_group, per_group, head_dim, own_group, head_dim, group, c, s, half, head_dim,
            INTERLEAVED, Q_HEADS, HALF, REST,
        )  # fmt: skip
        _turn(
            k_row, keys, groups, 1, 0, head_dim, 0, group, c, s, half, head_dim, INTERLEAVED, K_HEADS, HALF, REST
        )  # fmt: skip
        _copy(v_row, values, groups, head_dim, group, head_dim, K_HEADS, WIDTH)
    else:
        _turn(
            queries, q_row, groups * per_group, per_group, head_dim, group, head_dim, own_group, c, s, half, head_dim,
            INTERLEAVED, Q_HEADS, HALF, REST,
        )  # fmt: skip
        _turn(
            keys, k_row, groups, 1, 0, group, 0, head_dim, c, s, half, head_dim, INTERLEAVED, K_HEADS, HALF, REST
        )  # fmt: skip
        _copy(values, v_row, groups, group, head_dim, head_dim, K_HEADS, WIDTH)


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


def _launch_of_qkv(
    qkv: Tensor, parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> None:
    """qkv and parts (q, k, v): contiguous, one of them written. Shapes as in the catalogue."""
    batch, sequence, groups, rows, head_dim = qkv.shape
    half = cos.shape[-1]
    rest = head_dim - 2 * half
    if batch * sequence:
        with on_device(qkv):
            _rotary_of_qkv[(batch * sequence,)](
                qkv, *parts, cos, sin, sequence, groups, rows - 2, half, head_dim,
                sequence * half if cos.shape[0] > 1 else 0, backward, interleaved,
                min(triton.next_power_of_2(groups * (rows - 2)), _HEADS), min(triton.next_power_of_2(groups), _HEADS),
                triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(rest) if rest else 0,
                triton.next_power_of_2(head_dim),
            )  # fmt: skip


class _RotaryOfQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        batch, sequence, groups, rows, head_dim = qkv.shape
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        q = qkv.new_empty((batch, sequence, groups * (rows - 2), head_dim))
        k, v = [qkv.new_empty((batch, sequence, groups, head_dim)) for _ in range(2)]
        _launch_of_qkv(qkv.contiguous(), (q, k, v), cos, sin, interleaved, backward=False)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        batch, sequence, groups, head_dim = dk.shape
        dqkv = dk.new_empty((batch, sequence, groups, dq.shape[2] // groups + 2, head_dim))
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        _launch_of_qkv(dqkv, gradients, cos, sin, ctx.interleaved, backward=True)
        return dqkv, None, None, None


def rotary_of_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused` in the catalogue. q, k and v do not share memory with qkv, which can be freed."""
    parts: tuple[Tensor, Tensor, Tensor] = _RotaryOfQKV.apply(qkv, cos.contiguous(), sin.contiguous(), interleaved)
    return parts
