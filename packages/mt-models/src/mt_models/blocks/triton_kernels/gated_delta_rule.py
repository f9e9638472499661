"""The gated delta rule over whole sequences by Triton kernels, with its gradients.

What is kept for the backward pass, besides the inputs, are the inverses of the chunks' triangular systems and their
scores, two [L, L] for each chunk and head; states and updates are computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_models.blocks.gated_delta_rule import L2_EPSILON, DeltaInputs
from mt_models.blocks.triton_kernels.chunk_launches import (
    BLOCK_VALUE,
    ChunkGradients,
    ChunkParts,
    ChunkShape,
    contiguous_channels,
    gradients_of_chunks,
    numbered_documents,
    outputs_of_chunks,
    precision_of,
    states_of_chunks,
    strides_of,
)
from mt_models.blocks.triton_kernels.gated_chunks import (
    _gated_parts,
    _gated_parts_backward,
    _gated_systems,
    _gated_systems_backward,
)


def triton_gated_delta_rule(
    inputs: DeltaInputs, *, chunk_size: int, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_delta_rule`, for q, k and v of one dtype, bf16 or fp32, which is that of products.

    chunk_size: one of CHUNK_SIZES. Its gradients cannot be differentiated again.
    """
    outputs: tuple[Tensor, Tensor] = _GatedDeltaRule.apply(*inputs, state, chunk_size, numbered_documents(segment_ids))
    return outputs


class Arguments(NamedTuple):
    """Inputs of the kernels, each with contiguous channels."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    documents: Tensor | None

    @property
    def repeats(self) -> int:
        """Value heads of a key head."""
        return self.v.shape[2] // self.k.shape[2]

    @property
    def rates(self) -> tuple[Tensor, Tensor, Tensor]:
        """g, beta and documents; without these a kernel gets g, which it does not read for them."""
        return self.g, self.beta, self.g if self.documents is None else self.documents


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        chunk_size: int,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (rows, length, heads, value), dim = v.shape, k.shape[-1]
        shape = ChunkShape(rows, length, heads, dim, value, chunk_size)
        q, k, v = contiguous_channels(q), contiguous_channels(k), contiguous_channels(v)
        x = Arguments(q, k, v, g.contiguous(), beta.contiguous(), documents)
        start = None if state is None else state.float().contiguous()
        with on_device(v):
            inverse, scores = _systems(shape, x)
            parts = _parts(shape, x, inverse, scores)
            before, last = states_of_chunks(shape, parts, start)
            o = outputs_of_chunks(shape, parts, before, v)
        ctx.save_for_backward(*x[:5], inverse, scores, start, documents)
        ctx.shape, ctx.state_dtype = shape, None if state is None else state.dtype
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, inverse, scores, start, documents = ctx.saved_tensors
        x, shape = Arguments(q, k, v, g, beta, documents), ctx.shape
        do, dlast = grads
        # Of the outputs' shape also where only the state behind the last position has a gradient.
        do = x.v.new_zeros(x.v.shape) if do is None else do.to(x.v.dtype).contiguous()
        dlast = None if dlast is None else dlast.float().contiguous()
        with on_device(x.v):
            parts = _parts(shape, x, inverse, scores)
            before, _ = states_of_chunks(shape, parts, start)
            of_parts = gradients_of_chunks(shape, parts, before, inverse, x.v, x.beta, do, dlast)
            dq, dk, dg = _of_inputs(shape, x, scores, of_parts)
        dstate = None if ctx.state_dtype is None else of_parts.state.to(ctx.state_dtype)
        return dq, dk, of_parts.v, dg, of_parts.beta.to(x.beta.dtype), dstate, None, None


def _systems(shape: ChunkShape, x: Arguments) -> tuple[Tensor, Tensor]:
    """X and P"""
    inverse, scores = shape.pairs(x.v), shape.pairs(x.v)
    _gated_systems[(shape.programs,)](
        x.q, x.k, *x.rates, inverse, scores, shape.length, shape.heads, x.repeats, shape.chunks, shape.dim**-0.5,
        L2_EPSILON, *strides_of(x.q, x.k), x.documents is not None, shape.dim, shape.block_dim, shape.size,
        precision_of(x.v), num_warps=4, num_stages=2,
    )  # fmt: skip
    return inverse, scores


def _parts(shape: ChunkShape, x: Arguments, inverse: Tensor, scores: Tensor) -> ChunkParts:
    read, written, removed = shape.keys(x.v), shape.keys(x.v), shape.keys(x.v)
    parts = ChunkParts(scores, read, written, removed, shape.values(x.v), shape.decays(x.v))
    _gated_parts[(shape.programs,)](
        x.q, x.k, x.v, *x.rates, inverse, *parts[1:], shape.length, shape.heads, x.repeats, shape.chunks,
        shape.dim**-0.5, L2_EPSILON, *strides_of(x.q, x.k, x.v), x.documents is not None, shape.dim, shape.value,
        shape.block_dim, shape.all_values, shape.size, BLOCK_VALUE, precision_of(x.v), num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts


def _of_inputs(shape: ChunkShape, x: Arguments, scores: Tensor, grads: ChunkGradients) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and g; that of beta in `grads` is added to."""
    dg = torch.empty_like(x.g, dtype=torch.float32)
    constants = (x.documents is not None, shape.dim, shape.block_dim, shape.size, precision_of(x.v))
    _gated_systems_backward[(shape.programs,)](
        x.k, *x.rates, scores, grads.scores, grads.system, dg, grads.beta, shape.length, shape.heads, x.repeats,
        shape.chunks, L2_EPSILON, *strides_of(x.k), *constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    # Of key heads that several value heads share, the sum is taken of fp32 numbers.
    each = x.q.dtype if x.repeats == 1 else torch.float32
    dq = x.v.new_empty(shape.rows, shape.length, shape.heads, shape.dim, dtype=each)
    dk = torch.empty_like(dq)
    _gated_parts_backward[(shape.programs,)](
        x.q, x.k, *x.rates, grads.scores, grads.system, grads.read, grads.written, grads.looked, grads.over, dq, dk, dg,
        grads.beta, shape.length, shape.heads, x.repeats, shape.chunks, shape.dim**-0.5, L2_EPSILON,
        *strides_of(x.q, x.k), *constants, num_warps=8, num_stages=2,
    )  # fmt: skip
    if x.repeats > 1:
        dq, dk = of_key_heads(dq, x), of_key_heads(dk, x)
    return dq, dk, dg.to(x.g.dtype)


def of_key_heads(grad: Tensor, x: Arguments) -> Tensor:
    """[B, S, H, D] -> [B, S, G, D]"""
    return grad.unflatten(2, (-1, x.repeats)).sum(3).to(x.q.dtype)
