"""The state-space recurrence of Mamba-1 over whole sequences by Triton kernels, with its gradients.

For the backward pass the inputs alone are kept; states before chunks are computed again, and those of positions never
leave a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_models.blocks.triton_kernels.chunk_launches import numbered_documents
from mt_models.blocks.triton_kernels.selective_chunks import (
    _selective_backward,
    _selective_outputs,
    _selective_states,
    _selective_states_backward,
)

SIZE = 16
"""Positions of a chunk, whatever `chunk_size` is: a program holds the states of all of them."""
STATE = 256
"""Numbers of states that a program holds at a position; half as many where a channel has more than 16, so that the
kernel of the gradients keeps them in registers."""
PARTS = 8
"""Blocks of channels that a program of the gradients computes: there are as many sums for b and c as programs."""


def triton_selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = SIZE,
) -> tuple[Tensor, Tensor]:
    """The same as `selective_scan`. chunk_size: not used. Its gradients cannot be differentiated again."""
    start = None if state is None else state.float().contiguous()
    x, b, c = x.contiguous(), b.contiguous(), c.contiguous()
    documents = numbered_documents(segment_ids)
    outputs: tuple[Tensor, Tensor] = _Scan.apply(
        x, dt.float().contiguous(), a.float().contiguous(), b, c, start, documents
    )
    return outputs


class Arguments(NamedTuple):
    """Inputs of the kernels, contiguous"""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    documents: Tensor | None

    @property
    def numbers(self) -> Tensor:
        """Documents; without these a kernel gets dt, which it does not read for them."""
        return self.dt if self.documents is None else self.documents

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Positions, channels, chunks of a sequence"""
        return self.x.shape[1], self.x.shape[2], triton.cdiv(self.x.shape[1], SIZE)

    @property
    def constants(self) -> tuple[int, ...]:
        dim = self.a.shape[1]
        block_dim = int(triton.next_power_of_2(dim))
        held = STATE if block_dim <= 16 else STATE // 2
        return dim, block_dim, SIZE, min(held // block_dim, int(triton.next_power_of_2(self.x.shape[2])))

    def states(self) -> Tensor:
        """[B, K, C, N], not initialized"""
        return self.dt.new_empty(self.x.shape[0], self.sizes[2], *self.a.shape)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, dt, a, b, c, state, documents = inputs
        arguments = Arguments(x, dt, a, b, c, documents)
        with on_device(arguments.x):
            before, last = _states(arguments, state)
            y = _outputs(arguments, before)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, state, documents = ctx.saved_tensors
        arguments = Arguments(x, dt, a, b, c, documents)
        dy, dlast = grads
        dy = torch.zeros_like(arguments.dt) if dy is None else dy.float().contiguous()
        dlast = None if dlast is None else dlast.float().contiguous()
        with on_device(arguments.x):
            *of_inputs, dstate = _gradients(arguments, state, dy, dlast)
        return *of_inputs, None if state is None else dstate, None


def _states(x: Arguments, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before all chunks, and behind the last [B, C, N]."""
    before, last = x.states(), x.dt.new_empty(x.x.shape[0], *x.a.shape)
    _selective_states[(x.x.shape[0], triton.cdiv(x.x.shape[2], x.constants[-1]))](
        x.x, x.dt, x.a, x.b, x.numbers, last if state is None else state, before, last, *x.sizes,
        state is not None, x.documents is not None, *x.constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    return before, last


def _outputs(x: Arguments, before: Tensor) -> Tensor:
    y = torch.empty_like(x.dt)
    grid = (x.x.shape[0] * x.sizes[2], triton.cdiv(x.x.shape[2], x.constants[-1]))
    _selective_outputs[grid](
        *x[:5], x.numbers, before, y, *x.sizes, x.documents is not None, *x.constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def _gradients(x: Arguments, state: Tensor | None, dy: Tensor, dlast: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of x, dt, a, b, c, and of the state before the first position."""
    before, last = _states(x, state)
    behind, dstate = torch.empty_like(before), torch.empty_like(last)
    rows, length, channels = x.x.shape
    block = x.constants[-1]
    _selective_states_backward[(rows, triton.cdiv(channels, block))](
        x.dt, x.a, x.c, x.numbers, dy, dstate if dlast is None else dlast, behind, dstate, *x.sizes,
        dlast is not None, x.documents is not None, *x.constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    dx, ddt, programs = torch.empty_like(x.x), torch.empty_like(x.dt), triton.cdiv(channels, block * PARTS)
    db = x.dt.new_empty(programs, *x.b.shape)
    dc = torch.empty_like(db)
    _selective_backward[(rows * x.sizes[2], programs)](
        *x[:5], x.numbers, dy, before, behind, dx, ddt, db, dc, *x.sizes, rows * length,
        x.documents is not None, *x.constants, PARTS, num_warps=8, num_stages=2,
    )  # fmt: skip
    return dx, ddt, behind.sum((0, 1)), db.sum(0).to(x.b.dtype), dc.sum(0).to(x.c.dtype), dstate
