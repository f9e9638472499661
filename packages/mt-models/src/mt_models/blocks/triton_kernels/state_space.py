"""The state-space recurrence of Mamba-2 over whole sequences by Triton kernels, with its gradients.

For the backward pass the inputs alone are kept; states are computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_models.blocks.triton_kernels.chunk_launches import (
    BLOCK_VALUE,
    STATE_VALUES,
    ChunkShape,
    contiguous_channels,
    numbered_documents,
    precision_of,
    strides_of,
)
from mt_models.blocks.triton_kernels.state_space_chunks import (
    _ssd_outputs,
    _ssd_reads_backward,
    _ssd_states,
    _ssd_states_backward,
    _ssd_values_backward,
    _ssd_writes_backward,
)

SIZE = 64
"""Positions of a chunk, whatever `chunk_size` is: what fits into a program."""


def triton_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk_size: int,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `chunked_scan`, for x, b and c of one dtype, bf16 or fp32, which is that of products.

    chunk_size: not used. Its gradients cannot be differentiated again.
    """
    dt = dt.float()
    start = None if state is None else state.float().contiguous()
    documents = numbered_documents(segment_ids)
    outputs: tuple[Tensor, Tensor] = _Scan.apply(x, dt, dt * a.float(), b, c, start, documents)
    return outputs


class Arguments(NamedTuple):
    """Inputs of the kernels, each with contiguous channels."""

    x: Tensor
    dt: Tensor
    g: Tensor
    b: Tensor
    c: Tensor
    documents: Tensor | None

    @property
    def repeats(self) -> int:
        """Heads of a group."""
        return self.x.shape[2] // self.b.shape[2]

    @property
    def numbers(self) -> Tensor:
        """Documents; without these a kernel gets g, which it does not read for them."""
        return self.g if self.documents is None else self.documents


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        g: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (rows, length, heads, value), dim = x.shape, b.shape[-1]
        shape = ChunkShape(rows, length, heads, dim, value, SIZE)
        x, b, c = contiguous_channels(x), contiguous_channels(b), contiguous_channels(c)
        inputs = Arguments(x, dt.contiguous(), g.contiguous(), b, c, documents)
        with on_device(x):
            before, last = _states(shape, inputs, state)
            y = _outputs(shape, inputs, before)
        ctx.save_for_backward(x, inputs.dt, inputs.g, b, c, state, documents)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, g, b, c, state, documents = ctx.saved_tensors
        inputs = Arguments(x, dt, g, b, c, documents)
        dy, dlast = grads
        dy = x.new_zeros(x.shape) if dy is None else dy.to(x.dtype).contiguous()
        dlast = None if dlast is None else dlast.float().contiguous()
        with on_device(x):
            *of_inputs, dstate = _gradients(ctx.shape, inputs, state, dy, dlast)
        return *of_inputs, None if state is None else dstate, None


def _constants(shape: ChunkShape, x: Tensor, block_value: int) -> tuple[int | str, ...]:
    return (
        shape.dim, shape.value, shape.block_dim, shape.all_values, shape.size, block_value, precision_of(x)
    )  # fmt: skip


def _states(shape: ChunkShape, x: Arguments, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before all chunks, and behind the last [B, H, P, N]."""
    before = shape.states(x.x)
    last = x.x.new_empty(shape.rows, shape.heads, shape.value, shape.dim, dtype=torch.float32)
    _ssd_states[(shape.sequences, shape.all_values // STATE_VALUES)](
        x.x, x.dt, x.g, x.b, x.numbers, last if state is None else state, before, last, shape.length, shape.heads,
        x.repeats, shape.chunks, *strides_of(x.x, x.b), state is not None, x.documents is not None,
        *_constants(shape, x.x, STATE_VALUES), num_warps=4, num_stages=2,
    )  # fmt: skip
    return before, last


def _outputs(shape: ChunkShape, x: Arguments, before: Tensor) -> Tensor:
    y = x.x.new_empty(shape.rows, shape.length, shape.heads, shape.value)
    _ssd_outputs[(shape.programs, shape.all_values // BLOCK_VALUE)](
        x.x, x.dt, x.g, x.b, x.c, x.numbers, before, y, shape.length, shape.heads, x.repeats, shape.chunks,
        *strides_of(x.x, x.b, x.c), x.documents is not None, *_constants(shape, x.x, BLOCK_VALUE), num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return y


def _gradients(
    shape: ChunkShape, x: Arguments, state: Tensor | None, dy: Tensor, dlast: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of x, dt through u, g, b, c, and of the state before the first position."""
    before, last = _states(shape, x, state)
    dbehind, dstate = torch.empty_like(before), torch.empty_like(last)
    blocks = shape.all_values // STATE_VALUES
    parts = int(triton.next_power_of_2(blocks))
    dover = x.x.new_zeros(shape.sequences, shape.chunks, parts, dtype=torch.float32)
    strides, constants = strides_of(x.x, x.b, x.c), _constants(shape, x.x, BLOCK_VALUE)
    _ssd_states_backward[(shape.sequences, blocks)](
        x.g, x.c, x.numbers, dy, dstate if dlast is None else dlast, before, dbehind, dover, dstate, shape.length,
        shape.heads, x.repeats, shape.chunks, *strides_of(x.c), dlast is not None, parts, x.documents is not None,
        *_constants(shape, x.x, STATE_VALUES), num_warps=4, num_stages=2,
    )  # fmt: skip
    dx, ddt, dg, dproducts = torch.empty_like(dy), torch.empty_like(x.dt), torch.empty_like(x.g), shape.pairs(x.x)
    _ssd_values_backward[(shape.programs,)](
        x.x, x.dt, x.g, x.b, x.c, x.numbers, dy, dbehind, dx, ddt, dg, dproducts, shape.length, shape.heads, x.repeats,
        shape.chunks, *strides, x.documents is not None, *constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    groups = x.b.shape[2]
    db = x.b.new_empty(shape.rows, shape.length, groups, shape.dim)
    dc = torch.empty_like(db)
    grid = (shape.rows * groups * shape.chunks,)
    _ssd_reads_backward[grid](
        x.g, x.b, x.c, x.numbers, dy, before, dproducts, dg, dc, shape.length, shape.heads, x.repeats, shape.chunks,
        *strides_of(x.b, x.c), x.documents is not None, *constants, num_warps=8, num_stages=2,
    )  # fmt: skip
    _ssd_writes_backward[grid](
        x.x, x.dt, x.g, x.b, x.c, x.numbers, dover, dbehind, dproducts, dg, db, shape.length, shape.heads, x.repeats,
        shape.chunks, *strides, parts, x.documents is not None, *constants, num_warps=8, num_stages=2,
    )  # fmt: skip
    return dx, ddt, dg, db, dc, dstate
