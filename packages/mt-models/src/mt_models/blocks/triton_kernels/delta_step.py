# mypy: disable-error-code="no-untyped-def"
"""The recurrence of the gated delta rule and of Kimi delta attention, as decoding takes it, without gradients.

A program holds the columns of one head's state that belong to some channels of the values: they depend on no others. It
reads them once, takes its positions one after the other, and writes them once.

Shapes: B sequences, S positions, G key heads, H value heads, D channels of a key, V channels of a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_models.blocks.gated_delta_rule import L2_EPSILON, DeltaInputs

STATE = 4096
"""Elements of a state that a program of 4 warps holds: 32 registers of a thread."""


@triton.jit
def _delta_steps(
    q, k, v, g, beta, state, o, after, length, heads, repeats, scale, eps,
    q_row, q_position, q_head, k_row, k_position, k_head, v_row, v_position, v_head,
    BY_CHANNEL: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """g [B, S, H] or, BY_CHANNEL, [B, S, H, D]; beta [B, S, H]; state and after [B, H, D, V]; o [B, S, H, V]."""
    # int64: states of many sequences have more than 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    channel = tl.arange(0, BLOCK_DIM)
    value = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    channels, values = channel < DIM, value < VALUE
    places = (program * DIM + channel)[:, None] * VALUE + value[None, :]
    inside = channels[:, None] & values[None, :]
    current = tl.load(state + places, mask=inside, other=0.0)  # fp32 [BLOCK_DIM, BLOCK_VALUE]
    for t in range(length):
        at = (row * length + t) * heads + head  # of g, beta and o
        query = q + row * q_row + t * q_position + (head // repeats) * q_head
        key = k + row * k_row + t * k_position + (head // repeats) * k_head
        asked = tl.load(query + channel, mask=channels, other=0.0).to(tl.float32)
        asked *= scale / tl.sqrt(tl.sum(asked * asked, 0) + eps)
        written = tl.load(key + channel, mask=channels, other=0.0).to(tl.float32)
        written *= 1.0 / tl.sqrt(tl.sum(written * written, 0) + eps)
        if BY_CHANNEL:
            current *= tl.exp(tl.load(g + at * DIM + channel, mask=channels, other=0.0).to(tl.float32))[:, None]
        else:
            current *= tl.exp(tl.load(g + at).to(tl.float32))
        content = tl.load(v + row * v_row + t * v_position + head * v_head + value, mask=values, other=0.0)
        looked_up = tl.sum(current * written[:, None], 0)
        update = (content.to(tl.float32) - looked_up) * tl.load(beta + at).to(tl.float32)
        current += written[:, None] * update[None, :]
        tl.store(o + at * VALUE + value, tl.sum(current * asked[:, None], 0), mask=values)
    tl.store(after + places, current, mask=inside)


def columns_of(dim: int, value: int) -> int:
    """Channels of a value that a program computes."""
    columns = max(STATE // int(triton.next_power_of_2(dim)), 1)
    return min(columns, int(triton.next_power_of_2(value)), 64)


def triton_delta_step(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_delta_rule` and, with g [B, S, H, D], as `recurrent_kimi_rule`. segment_ids
    are not supported."""
    assert segment_ids is None, "positions that are decoded are of one document"
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])
    g, beta = inputs.g.contiguous(), inputs.beta.contiguous()
    (rows, length, heads, value), dim = v.shape, k.shape[-1]
    if state is None:
        state = torch.zeros(rows, heads, dim, value, dtype=torch.float32, device=v.device)
    state = state.float().contiguous()
    o, after = torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(state)
    columns = columns_of(dim, value)
    with on_device(v):
        _delta_steps[(rows * heads, triton.cdiv(value, columns))](
            q, k, v, g, beta, state, o, after, length, heads, heads // k.shape[2], dim**-0.5, L2_EPSILON,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            g.dim() == 4, dim, value, int(triton.next_power_of_2(dim)), columns, num_warps=4,
        )  # fmt: skip
    return o, after
