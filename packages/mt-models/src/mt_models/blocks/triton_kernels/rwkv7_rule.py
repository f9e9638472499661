"""The recurrence of RWKV-7 by Triton kernels, with its gradients: whole sequences, and single positions of decoding.

A program takes the positions of one head one after the other. It holds the columns of the state that belong to a block
of value channels, which depend on no others, in registers. For the backward pass the states before every `EVERY`-th
position are kept; those between are computed again, a block of positions at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_models.blocks.rwkv7_rule import Rwkv7Inputs
from mt_models.blocks.triton_kernels.chunk_launches import numbered_documents
from mt_models.blocks.triton_kernels.rwkv7_positions import _rwkv7_backward, _rwkv7_forward

WIDEST_HEAD = 128
"""Channels of a key."""
EVERY = 32
"""Positions from one state that is kept to the next."""
FORWARD_STATE, FORWARD_WARPS = 1024, 1
"""Elements of a state that a program holds, 32 in each thread: within a warp sums need no barriers."""
BACKWARD_STATE, BACKWARD_WARPS = 4096, 4
"""The whole state of a head of 64 channels: sums over value channels need no second kernel."""


@dataclass(frozen=True)
class RuleShape:
    """Sizes of one call."""

    rows: int
    length: int
    heads: int
    dim: int
    value: int

    @property
    def sequences(self) -> int:
        return self.rows * self.heads

    @property
    def kept(self) -> int:
        """States of a sequence that are kept."""
        return -(-self.length // EVERY)

    def block_value(self, elements: int) -> int:
        """Value channels of a program that holds `elements` of a state."""
        return min(max(elements // self.block_dim, 1), int(triton.next_power_of_2(self.value)))

    def blocks(self, elements: int) -> int:
        return -(-self.value // self.block_value(elements))

    @property
    def block_dim(self) -> int:
        return int(triton.next_power_of_2(self.dim))

    def states(self, like: Tensor, *count: int) -> Tensor:
        """[B, H, *count, D, V] in fp32, not initialized"""
        return like.new_empty(self.rows, self.heads, *count, self.dim, self.value, dtype=torch.float32)

    def constants(self, elements: int) -> tuple[int, ...]:
        return EVERY, self.dim, self.value, self.block_dim, self.block_value(elements)


def triton_rwkv7_rule(
    inputs: Rwkv7Inputs,
    *,
    chunk_size: int | None = None,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_rwkv7_rule`, computed in fp32, with the state [B, H, D, V] in fp32.

    chunk_size: not used. Its gradients cannot be differentiated again.
    """
    start = None if state is None else state.float().contiguous()
    documents = numbered_documents(segment_ids)
    tensors = (*inputs, start)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        outputs: tuple[Tensor, Tensor] = _Rule.apply(*tensors, documents)
        return outputs
    o, last, _ = _forward(Rwkv7Inputs(*(x.contiguous() for x in inputs)), start, documents, keeps=False)
    return o, last


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        *of_positions, state, documents = tensors
        inputs = Rwkv7Inputs(*(x.contiguous() for x in of_positions if x is not None))
        o, last, kept = _forward(inputs, state, documents, keeps=True)
        ctx.save_for_backward(*inputs, kept, documents)
        ctx.has_state = state is not None
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, kept, documents = ctx.saved_tensors
        *of_inputs, of_state = _backward(Rwkv7Inputs(*tensors), kept, documents, *grads)
        return *of_inputs, of_state if ctx.has_state else None, None


def _shape(x: Rwkv7Inputs) -> RuleShape:
    (rows, length, heads, value), dim = x.v.shape, x.k.shape[-1]
    return RuleShape(rows, length, heads, dim, value)


def _forward(
    x: Rwkv7Inputs, state: Tensor | None, documents: Tensor | None, *, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the last state, and states that are kept [B, H, S / EVERY, D, V]."""
    shape = _shape(x)
    o, last = torch.empty_like(x.v), shape.states(x.v)
    kept = shape.states(x.v, shape.kept) if keeps else last
    with on_device(x.v):
        _rwkv7_forward[(shape.sequences, shape.blocks(FORWARD_STATE))](
            *x, _or(documents, last), _or(state, last), o, kept, last, shape.length, shape.heads, shape.kept,
            state is not None, documents is not None, keeps, *shape.constants(FORWARD_STATE), num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return o, last, kept


def _backward(
    x: Rwkv7Inputs, kept: Tensor, documents: Tensor | None, do: Tensor | None, dlast: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of r, w, k, v, z, a, and of the state before the first position."""
    shape = _shape(x)
    do = torch.zeros_like(x.v) if do is None else do.contiguous()
    dstate, between = shape.states(x.v), shape.states(x.v, min(EVERY, shape.length))
    blocks, dv = shape.blocks(BACKWARD_STATE), torch.empty_like(x.v)
    dr, dw, dk, dz, da = (_parts(y, blocks) for y in (x.r, x.w, x.k, x.z, x.a))
    with on_device(x.v):
        _rwkv7_backward[(shape.sequences, blocks)](
            *x, _or(documents, dstate), kept, do, dstate if dlast is None else dlast.float().contiguous(), between,
            dr, dw, dk, dv, dz, da, dstate, shape.length, shape.heads, shape.kept, x.v.shape[0] * shape.length,
            between.shape[2], dlast is not None, documents is not None, *shape.constants(BACKWARD_STATE),
            num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    r, w, k, z, a = (_sum(part, y) for part, y in zip((dr, dw, dk, dz, da), (x.r, x.w, x.k, x.z, x.a), strict=True))
    return r, w, k, dv, z, a, dstate


def _or(x: Tensor | None, unread: Tensor) -> Tensor:
    """A kernel gets a tensor that it does not read in the place of one that is absent."""
    return unread if x is None else x


def _parts(x: Tensor, blocks: int) -> Tensor:
    """What each block of value channels adds to the gradient of x [B, S, H, D]."""
    return x.new_empty(blocks, *x.shape, dtype=x.dtype if blocks == 1 else torch.float32)


def _sum(parts: Tensor, x: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0).to(x.dtype)
