# mypy: disable-error-code="no-untyped-def"
"""The state-space recurrences of Mamba-1 and Mamba-2, as decoding takes them, without gradients.

A program holds the state of some channels of one head: it reads it once, takes its positions one after the other, and
writes it once. Channels depend on no others.

Shapes: B sequences, S positions, G groups, H heads, P channels of a head, N numbers of the state of a channel. Mamba-1
is one head of all channels, with a decay of each number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device

STATE = 2048
"""Numbers of states that a program of 4 warps holds: 16 registers of a thread."""


@triton.jit
def _state_steps(
    x, dt, a, b, c, state, y, after, length, heads, repeats,
    x_row, x_position, x_head, b_row, b_position, b_head, c_row, c_position, c_head,
    BY_NUMBER: tl.constexpr, VALUE: tl.constexpr, DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """dt [B, S, H] and a [H] or, BY_NUMBER, [B, S, H, P] and [H, P, N]; state and after [B, H, P, N]; y [B, S, H, P]"""
    # int64: states of many sequences have more than 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    value, number = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_DIM)
    values, numbers = value < VALUE, number < DIM
    inside = values[:, None] & numbers[None, :]
    at = value[:, None] * DIM + number[None, :]
    current = tl.load(state + program * VALUE * DIM + at, mask=inside, other=0.0)
    if BY_NUMBER:
        rates = tl.load(a + head * VALUE * DIM + at, mask=inside, other=0.0)
    else:
        rate = tl.load(a + head)
    for t in range(length):
        place = (row * length + t) * heads + head  # of dt and y
        content = tl.load(x + row * x_row + t * x_position + head * x_head + value, mask=values, other=0.0)
        key = b + row * b_row + t * b_position + (head // repeats) * b_head
        key = tl.load(key + number, mask=numbers, other=0.0).to(tl.float32)
        query = c + row * c_row + t * c_position + (head // repeats) * c_head
        query = tl.load(query + number, mask=numbers, other=0.0).to(tl.float32)
        if BY_NUMBER:
            step = tl.load(dt + place * VALUE + value, mask=values, other=0.0)
            current *= tl.exp(step[:, None] * rates)
        else:
            step = tl.load(dt + place)
            current *= tl.exp(step * rate)
        current += (step * content.to(tl.float32))[:, None] * key[None, :]
        tl.store(y + place * VALUE + value, tl.sum(current * query[None, :], 1), mask=values)
    tl.store(after + program * VALUE * DIM + at, current, mask=inside)


def triton_state_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_scan`. segment_ids are not supported."""
    return _launched(x, dt, a, b, c, state, segment_ids, x.dtype)


def triton_selective_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `selective_scan`. segment_ids are not supported."""
    x, dt, a, b, c = x[:, :, None], dt[:, :, None], a[None], b[:, :, None], c[:, :, None]
    state = None if state is None else state[:, None]
    y, after = _launched(x, dt, a, b, c, state, segment_ids, torch.float32)
    return y[:, :, 0], after[:, 0]


def _launched(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x [B, S, H, P], b and c [B, S, G, N], dt and a as the kernel takes them -> y in dtype, and the state"""
    assert segment_ids is None, "positions that are decoded are of one document"
    x, b, c = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, b, c))
    (rows, length, heads, value), dim = x.shape, b.shape[-1]
    if state is None:
        state = torch.zeros(rows, heads, value, dim, dtype=torch.float32, device=x.device)
    state = state.float().contiguous()
    y, after = x.new_empty(x.shape, dtype=dtype), torch.empty_like(state)
    block_dim = int(triton.next_power_of_2(dim))
    block_value = min(max(STATE // block_dim, 1), int(triton.next_power_of_2(value)))
    with on_device(x):
        _state_steps[(rows * heads, triton.cdiv(value, block_value))](
            x, dt.float().contiguous(), a.float().contiguous(), b, c, state, y, after, length, heads,
            heads // b.shape[2], *x.stride()[:3], *b.stride()[:3], *c.stride()[:3],
            a.dim() == 3, value, dim, block_value, block_dim, num_warps=4,
        )  # fmt: skip
    return y, after
