# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries and keys in one launch: a program turns all heads of one token."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device


@triton.jit
def place(head, per_group, head_stride, group_stride):
    """Offset of heads in groups of per_group: [R] numbers of heads -> [R] elements."""
    return (head // per_group) * group_stride + (head % per_group) * head_stride


@triton.jit
def load_pairs(row, valid, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """The channels that are turned of rows [R, 1], valid [R]: both of each pair, [R, HALF] in fp32."""
    pair = tl.arange(0, HALF)
    if INTERLEAVED:
        # Neighbours are loaded together and taken apart in registers.
        both = tl.arange(0, 2 * HALF)
        value = tl.load(row + both[None, :], mask=valid[:, None] & (both < 2 * half)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(value.to(tl.float32), [row.shape[0], HALF, 2]))  # [R, HALF] each
    else:
        inside = valid[:, None] & (pair < half)[None, :]
        a = tl.load(row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + half + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(row, valid, a, b, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """The inverse of load_pairs: a and b [R, HALF] to the channels that are turned of rows [R, 1]."""
    pair = tl.arange(0, HALF)
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF)
        value = tl.reshape(tl.join(a, b), [row.shape[0], 2 * HALF])
        tl.store(row + both[None, :], value, mask=valid[:, None] & (both < 2 * half)[None, :])
    else:
        inside = valid[:, None] & (pair < half)[None, :]
        tl.store(row + pair[None, :], a, mask=inside)
        tl.store(row + half + pair[None, :], b, mask=inside)


@triton.jit
def turn(
    source, target, heads, per_group, source_head, source_group, target_head, target_group, cos, sin, half, head_dim,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The heads of one token, in groups: source and target with strides of heads and of groups of their own."""
    # HEADS at a time: the tile of all heads of a large model does not fit in registers.
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        row = source + place(head, per_group, source_head, source_group)[:, None]
        out = target + place(head, per_group, target_head, target_group)[:, None]
        a, b = load_pairs(row, head < heads, half, INTERLEAVED, HALF)
        first, second = a * cos[None, :] - b * sin[None, :], a * sin[None, :] + b * cos[None, :]
        store_pairs(out, head < heads, first, second, half, INTERLEAVED, HALF)
        # Partial rotary embedding: the channels behind the first 2 * half are copied.
        if REST > 0:
            rest = 2 * half + tl.arange(0, REST)
            passing = (head < heads)[:, None] & (rest < head_dim)[None, :]
            tl.store(out + rest[None, :], tl.load(row + rest[None, :], mask=passing), mask=passing)


@triton.jit
def copy(source, target, heads, source_head, target_head, head_dim, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Heads of one token as they are: source and target with strides of heads of their own."""
    channel = tl.arange(0, WIDTH)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (channel < head_dim)[None, :]
        value = tl.load(source + head[:, None] * source_head + channel[None, :], mask=inside)
        tl.store(target + head[:, None] * target_head + channel[None, :], value, mask=inside)


@triton.jit
def angle(cos, sin, offset, half, INVERSE: tl.constexpr, HALF: tl.constexpr):
    """cos and sin [HALF] of a token in fp32; INVERSE: of the opposite angle."""
    pair = tl.arange(0, HALF)
    c = tl.load(cos + offset + pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + offset + pair, mask=pair < half, other=0.0).to(tl.float32)
    # The transpose of a rotation is the rotation by the opposite angle.
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
    """One program a token. q [B, S, q_heads, D] and k [B, S, k_heads, D] with stride 1 in D -> q_out and k_out,
    contiguous."""
    token = tl.program_id(0).to(tl.int64)
    # One program a token: its angles are loaded once for all heads of q and k.
    batch, position = token // sequence, token % sequence
    c, s = angle(cos, sin, batch * angle_batch_stride + position * half, half, INVERSE, HALF)
    # By strides: q and k may be views of the product of queries, keys and values. Results are contiguous.
    q_row = q + batch * q_batch_stride + position * q_token_stride
    k_row = k + batch * k_batch_stride + position * k_token_stride
    q_target = q_out + token * q_heads * head_dim
    k_target = k_out + token * k_heads * head_dim
    turn(
        # A single group of all heads, whose own stride does not matter.
        q_row, q_target, q_heads, q_heads, q_head_stride, 0, head_dim, 0, c, s, half, head_dim,
        INTERLEAVED, Q_HEADS, HALF, REST,
    )  # fmt: skip
    turn(
        k_row, k_target, k_heads, k_heads, k_head_stride, 0, head_dim, 0, c, s, half, head_dim,
        INTERLEAVED, K_HEADS, HALF, REST,
    )  # fmt: skip


HEADS = 32
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
                # cos [1, S, 1, R / 2] serves every sample: the stride 0.
                *q.stride()[:3], *k.stride()[:3], sequence * half if cos.shape[0] > 1 else 0,
                inverse, interleaved,
                # Tile sizes are powers of two for tl.arange; REST 0 leaves that part out of the kernel.
                min(triton.next_power_of_2(q_heads), HEADS), min(triton.next_power_of_2(k_heads), HEADS),
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
    """Same as mt_core.nn.kernels.reference.layers.rotary."""
    turned: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos.contiguous(), sin.contiguous(), interleaved)
    return turned
