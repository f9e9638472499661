# mypy: disable-error-code="no-untyped-def"
"""Queries, keys and values out of their product, in one launch each way: split, normalized per head where a model does
that, and turned. A program takes all heads of a token.

With norms the backward pass takes the heads before them again from the product, which is kept in place of what separate
norms keep. Each program adds up the gradients of the weights over its tokens; torch adds those of the programs, always
in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.reference.layers import HeadNorms
from mt_core.nn.kernels.triton_kernels.launch import multiprocessors, on_device
from mt_core.nn.kernels.triton_kernels.rotary import HEADS, angle, copy, load_pairs, place, store_pairs, turn

_PROGRAMS_PER_MULTIPROCESSOR = 8
_NORMED_HEADS = 16
"""Heads of a tile at most, of which the backward pass holds more."""


@triton.jit
def _rotary_of_qkv(
    qkv, q, k, v, cos, sin, sequence, groups, per_group, half, head_dim, angle_batch_stride,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """From qkv to q, k and v, all contiguous; backward from the gradients of these to that of qkv, turned back."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    c, s = angle(cos, sin, batch * angle_batch_stride + position * half, half, BACKWARD, HALF)
    # A row of 2 groups with 2 query heads each: q0 q1 k0 v0 q2 q3 k1 v1, `group` numbers from q0 to q2.
    group = (per_group + 2) * head_dim
    queries = qkv + token * groups * group
    keys = queries + per_group * head_dim
    values = keys + head_dim
    own_group = per_group * head_dim
    q_row = q + token * groups * own_group
    k_row = k + token * groups * head_dim
    v_row = v + token * groups * head_dim
    if BACKWARD:
        # The same places with source and target exchanged, by the opposite angle.
        turn(
            q_row, queries, groups * per_group, per_group, head_dim, own_group, head_dim, group, c, s, half, head_dim,
            INTERLEAVED, Q_HEADS, HALF, REST,
        )  # fmt: skip
        turn(
            k_row, keys, groups, 1, 0, head_dim, 0, group, c, s, half, head_dim, INTERLEAVED, K_HEADS, HALF, REST
        )  # fmt: skip
        copy(v_row, values, groups, head_dim, group, head_dim, K_HEADS, WIDTH)
    else:
        turn(
            queries, q_row, groups * per_group, per_group, head_dim, group, head_dim, own_group, c, s, half, head_dim,
            INTERLEAVED, Q_HEADS, HALF, REST,
        )  # fmt: skip
        turn(
            keys, k_row, groups, 1, 0, group, 0, head_dim, c, s, half, head_dim, INTERLEAVED, K_HEADS, HALF, REST
        )  # fmt: skip
        copy(values, v_row, groups, group, head_dim, head_dim, K_HEADS, WIDTH)


@triton.jit
def _weight_pairs(weight, half, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """[1, HALF] each"""
    # The weight as the only row, so that its channels are paired as those of heads are.
    a, b = load_pairs(weight + tl.zeros([1, 1], tl.int32), tl.full([1], True, tl.int1), half, INTERLEAVED, HALF)
    if ZERO_CENTERED:
        a, b = a + 1.0, b + 1.0
    return a, b


@triton.jit
def _load_rest(row, valid, half, head_dim, REST: tl.constexpr):
    """The channels that are not turned: [R, REST] in fp32."""
    rest = 2 * half + tl.arange(0, REST)
    return tl.load(row + rest[None, :], mask=valid[:, None] & (rest < head_dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weight_rest(weight, half, head_dim, ZERO_CENTERED: tl.constexpr, REST: tl.constexpr):
    value = _load_rest(weight + tl.zeros([1, 1], tl.int32), tl.full([1], True, tl.int1), half, head_dim, REST)
    if ZERO_CENTERED:
        value += 1.0
    return value


@triton.jit
def _store_rest(row, valid, value, half, head_dim, REST: tl.constexpr):
    rest = 2 * half + tl.arange(0, REST)
    tl.store(row + rest[None, :], value, mask=valid[:, None] & (rest < head_dim)[None, :])


@triton.jit
def _norm_and_turn(
    source, target, weight, scale, eps, heads, per_group, source_head, source_group, cos, sin, half, head_dim,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The heads of one token, in groups, to a contiguous target. scale: of the norm's result."""
    wa, wb = _weight_pairs(weight, half, ZERO_CENTERED, INTERLEAVED, HALF)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        valid = head < heads
        row = source + place(head, per_group, source_head, source_group)[:, None]  # [HEADS, 1]
        out = target + (head * head_dim)[:, None]
        a, b = load_pairs(row, valid, half, INTERLEAVED, HALF)  # [HEADS, HALF], fp32
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            rest = _load_rest(row, valid, half, head_dim, REST)
            squares += tl.sum(rest * rest, 1)
        # RMSNorm over all head_dim channels, those that are not turned included. q_scale is folded into the factor.
        factor = (scale / tl.sqrt(squares / head_dim + eps))[:, None]
        a, b = a * factor * wa, b * factor * wb
        first, second = a * cos[None, :] - b * sin[None, :], a * sin[None, :] + b * cos[None, :]
        store_pairs(out, valid, first, second, half, INTERLEAVED, HALF)
        if REST > 0:
            rest *= factor * _weight_rest(weight, half, head_dim, ZERO_CENTERED, REST)
            _store_rest(out, valid, rest, half, head_dim, REST)


@triton.jit
def _normed_rotary_of_qkv_forward(
    qkv, q, k, v, q_weight, k_weight, cos, sin,
    sequence, groups, per_group, half, head_dim, angle_batch_stride, q_scale, eps,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Same as _rotary_of_qkv forward, with RMSNorms of the heads of queries and keys before they are turned."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    c, s = angle(cos, sin, batch * angle_batch_stride + position * half, half, False, HALF)
    group = (per_group + 2) * head_dim
    queries = qkv + token * groups * group
    keys = queries + per_group * head_dim
    _norm_and_turn(
        queries, q + token * groups * per_group * head_dim, q_weight, q_scale, eps, groups * per_group, per_group,
        head_dim, group, c, s, half, head_dim, ZERO_CENTERED, INTERLEAVED, Q_HEADS, HALF, REST,
    )  # fmt: skip
    _norm_and_turn(
        keys, k + token * groups * head_dim, k_weight, 1.0, eps, groups, 1,
        # One key head a group: the stride within a group is not used.
        0, group, c, s, half, head_dim, ZERO_CENTERED, INTERLEAVED, K_HEADS, HALF, REST,
    )  # fmt: skip
    copy(keys + head_dim, v + token * groups * head_dim, groups, group, head_dim, head_dim, K_HEADS, WIDTH)


@triton.jit
def _norm_and_turn_backward(
    grads, source, target, weight, scale, eps, heads, per_group, head_stride, group_stride, cos, sin, half, head_dim,
    sum_a, sum_b, sum_rest,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Gradients of one token: grads is contiguous; source and target are at the same places of the product and of its
    gradient. cos and sin turn back. The sums [HEADS, ...] are over tokens, of the gradient of the norm's weight."""
    wa, wb = _weight_pairs(weight, half, ZERO_CENTERED, INTERLEAVED, HALF)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        valid = head < heads
        offset = place(head, per_group, head_stride, group_stride)[:, None]
        grad = grads + (head * head_dim)[:, None]
        first, second = load_pairs(grad, valid, half, INTERLEAVED, HALF)
        # cos and sin of the opposite angle: the gradient of the norm's result, times q_scale.
        da = (first * cos[None, :] - second * sin[None, :]) * scale
        db = (first * sin[None, :] + second * cos[None, :]) * scale
        a, b = load_pairs(source + offset, valid, half, INTERLEAVED, HALF)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            rest = _load_rest(source + offset, valid, half, head_dim, REST)
            squares += tl.sum(rest * rest, 1)
        # A number that is not infinite where there is no head, whose part of the sums is 0, with eps = 0 too.
        inverse = (1.0 / tl.sqrt(tl.maximum(squares / head_dim + eps, 1e-30)))[:, None]
        # x^ = x rstd. dw = sum of d x^;  dx = rstd (g - x^ mean(g x^)) with g = d w, the mean over all channels.
        a, b = a * inverse, b * inverse
        # [HEADS, HALF], one sum for each place of the tile: the reduction over heads waits until all tokens are added.
        sum_a += da * a
        sum_b += db * b
        da, db = da * wa, db * wb
        along = tl.sum(da * a, 1) + tl.sum(db * b, 1)
        if REST > 0:
            rest *= inverse
            drest = _load_rest(grad, valid, half, head_dim, REST) * scale
            sum_rest += drest * rest
            drest *= _weight_rest(weight, half, head_dim, ZERO_CENTERED, REST)
            along += tl.sum(drest * rest, 1)
        mean = (along / head_dim)[:, None]
        store_pairs(
            target + offset, valid, inverse * (da - a * mean), inverse * (db - b * mean), half, INTERLEAVED, HALF
        )
        if REST > 0:
            _store_rest(target + offset, valid, inverse * (drest - rest * mean), half, head_dim, REST)
    return sum_a, sum_b, sum_rest


@triton.jit
def _store_weight_gradient(
    target, sum_a, sum_b, sum_rest, half, head_dim,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """target [head_dim] fp32: the sums over the heads of a tile, which stand by pairs, in the order of channels."""
    # A tile of one row, stored in the order of channels.
    row, valid = target + tl.zeros([1, 1], tl.int32), tl.full([1], True, tl.int1)
    store_pairs(row, valid, tl.sum(sum_a, 0)[None, :], tl.sum(sum_b, 0)[None, :], half, INTERLEAVED, HALF)
    if REST > 0:
        _store_rest(row, valid, tl.sum(sum_rest, 0)[None, :], half, head_dim, REST)


@triton.jit
def _normed_rotary_of_qkv_backward(
    dq, dk, dv, qkv, dqkv, dweights, q_weight, k_weight, cos, sin,
    tokens, sequence, groups, per_group, half, head_dim, angle_batch_stride, q_scale, eps,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dweights [programs, 2, head_dim]: what this program's tokens add to the gradients of both weights."""
    # tl.zeros takes no dimension of 0; the sums are not used then.
    RESTS: tl.constexpr = REST if REST > 0 else 1
    group = (per_group + 2) * head_dim
    qa, qb = tl.zeros([Q_HEADS, HALF], tl.float32), tl.zeros([Q_HEADS, HALF], tl.float32)
    ka, kb = tl.zeros([K_HEADS, HALF], tl.float32), tl.zeros([K_HEADS, HALF], tl.float32)
    q_rest, k_rest = tl.zeros([Q_HEADS, RESTS], tl.float32), tl.zeros([K_HEADS, RESTS], tl.float32)
    first, programs = tl.program_id(0), tl.num_programs(0)
    # Tokens first, first + programs, ...; the partial sums of the weights stay in registers.
    for step in range(tl.cdiv(tokens - first, programs)):
        token = (first + step * programs).to(tl.int64)
        batch, position = token // sequence, token % sequence
        c, s = angle(cos, sin, batch * angle_batch_stride + position * half, half, True, HALF)
        queries = token * groups * group
        keys = queries + per_group * head_dim
        qa, qb, q_rest = _norm_and_turn_backward(
            dq + token * groups * per_group * head_dim, qkv + queries, dqkv + queries, q_weight, q_scale, eps,
            groups * per_group, per_group, head_dim, group, c, s, half, head_dim, qa, qb, q_rest,
            ZERO_CENTERED, INTERLEAVED, Q_HEADS, HALF, REST,
        )  # fmt: skip
        ka, kb, k_rest = _norm_and_turn_backward(
            dk + token * groups * head_dim, qkv + keys, dqkv + keys, k_weight, 1.0, eps,
            groups, 1, 0, group, c, s, half, head_dim, ka, kb, k_rest,
            ZERO_CENTERED, INTERLEAVED, K_HEADS, HALF, REST,
        )  # fmt: skip
        copy(dv + token * groups * head_dim, dqkv + keys + head_dim, groups, head_dim, group, head_dim, K_HEADS, WIDTH)
    gradients = dweights + tl.program_id(0).to(tl.int64) * 2 * head_dim  # [2, head_dim]
    _store_weight_gradient(gradients, qa, qb, q_rest, half, head_dim, INTERLEAVED, HALF, REST)
    _store_weight_gradient(gradients + head_dim, ka, kb, k_rest, half, head_dim, INTERLEAVED, HALF, REST)


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
                min(triton.next_power_of_2(groups * (rows - 2)), HEADS), min(triton.next_power_of_2(groups), HEADS),
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
        # Attention's backward pass may give gradients of transposed views.
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        _launch_of_qkv(dqkv, gradients, cos, sin, ctx.interleaved, backward=True)
        return dqkv, None, None, None


def _sizes(qkv: Tensor, cos: Tensor) -> tuple[int, ...]:
    """What both kernels with norms take: sequence, groups, queries of one, pairs, channels, stride of angles."""
    _, sequence, groups, rows, head_dim = qkv.shape
    half = cos.shape[-1]
    return sequence, groups, rows - 2, half, head_dim, sequence * half if cos.shape[0] > 1 else 0


def _tiles(qkv: Tensor, cos: Tensor) -> tuple[int, ...]:
    _, groups, per_group, half, head_dim, _ = _sizes(qkv, cos)
    rest = head_dim - 2 * half
    return (
        min(triton.next_power_of_2(groups * per_group), _NORMED_HEADS),
        min(triton.next_power_of_2(groups), _NORMED_HEADS),
        triton.next_power_of_2(max(half, 1)),
        triton.next_power_of_2(rest) if rest else 0,
        triton.next_power_of_2(head_dim),
    )


class _NormedRotaryOfQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
        interleaved: bool, eps: float, zero_centered: bool, q_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        qkv = qkv.contiguous()
        batch, sequence, groups, rows, head_dim = qkv.shape
        # qkv itself: the backward pass normalizes the heads again, so no normalized copy is kept.
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        # In the order of the kernels' last parameters before the tiles.
        ctx.options = q_scale, eps, zero_centered, interleaved
        q = qkv.new_empty((batch, sequence, groups * (rows - 2), head_dim))
        k, v = [qkv.new_empty((batch, sequence, groups, head_dim)) for _ in range(2)]
        if batch * sequence:
            with on_device(qkv):
                _normed_rotary_of_qkv_forward[(batch * sequence,)](
                    qkv, q, k, v, q_weight, k_weight, cos, sin, *_sizes(qkv, cos), *ctx.options, *_tiles(qkv, cos)
                )
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        tokens = qkv.shape[0] * qkv.shape[1]
        programs = min(tokens, multiprocessors(qkv) * _PROGRAMS_PER_MULTIPROCESSOR)  # each with a row of partial sums
        dqkv = torch.empty_like(qkv)
        # [programs, 2, head_dim]; without tokens [0, 2, head_dim], whose sum is 0.
        parts = torch.empty(programs, 2, qkv.shape[-1], dtype=torch.float32, device=qkv.device)
        if tokens:
            with on_device(qkv):
                _normed_rotary_of_qkv_backward[(programs,)](
                    dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv, dqkv, parts, q_weight, k_weight, cos, sin,
                    tokens, *_sizes(qkv, cos), *ctx.options, *_tiles(qkv, cos),
                )  # fmt: skip
        dq_weight, dk_weight = parts.sum(0).to(q_weight.dtype).unbind()
        return dqkv, dq_weight, dk_weight, None, None, None, None, None, None


def rotary_of_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused` in the catalogue. q, k and v do not share memory with qkv, which without norms can be freed."""
    cos, sin = cos.contiguous(), sin.contiguous()
    parts: tuple[Tensor, Tensor, Tensor]
    if norms is None:
        parts = _RotaryOfQKV.apply(qkv, cos, sin, interleaved)
    else:
        weights = norms.q_weight.contiguous(), norms.k_weight.contiguous()
        parts = _NormedRotaryOfQKV.apply(
            qkv, *weights, cos, sin, interleaved, norms.eps, norms.zero_centered, norms.q_scale
        )
    return parts
