"""Kimi delta attention over whole sequences by Triton kernels, with its gradients.

Kernels compute decayed products, triangular inverses, the states between chunks and the outputs; lengths of queries and
keys, sums of decays and what is multiplied by them element by element are torch's, with the gradients of autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_models.blocks.chunk_segments import chunk_segments
from mt_models.blocks.gated_delta_rule import DeltaInputs, unit_queries_and_keys
from mt_models.blocks.triton_kernels.chunk_launches import (
    BLOCK_KEY,
    ChunkParts,
    ChunkShape,
    contiguous_channels,
    gradients_of_chunks,
    numbered_documents,
    outputs_of_chunks,
    precision_of,
    states_of_chunks,
)
from mt_models.blocks.triton_kernels.kimi_chunks import (
    _kimi_columns_backward,
    _kimi_products,
    _kimi_rows_backward,
    _triangular_inverses,
)


def triton_kimi_rule(
    inputs: DeltaInputs, *, chunk_size: int, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_kimi_rule`, for q, k and v of one dtype, bf16 or fp32, which is that of products.

    chunk_size: one of CHUNK_SIZES. Its gradients cannot be differentiated again.
    """
    (rows, length, heads, value), dim = inputs.v.shape, inputs.k.shape[-1]
    shape, dtype = ChunkShape(rows, length, heads, dim, value, chunk_size), inputs.v.dtype
    unit_q, unit_k = unit_queries_and_keys(inputs.q, inputs.k)
    q, k, g = _chunks(unit_q, shape), _chunks(unit_k, shape), _chunks(inputs.g.float(), shape)
    rates = F.pad(inputs.beta.float(), (0, 0, 0, -length % chunk_size)).movedim(2, 1)  # [B, H, K L]
    rate = rates.reshape(shape.sequences, shape.chunks, chunk_size, 1)
    total = g.cumsum(2)
    end = total[:, :, -1:]
    reach, to_end, over = total.exp(), (end - total).exp(), end.squeeze(2).exp()
    scores, products = _DecayedProducts.apply(q.to(dtype), k.to(dtype), total)
    system = products.tril(-1) * rate
    if (documents := numbered_documents(segment_ids)) is not None:
        segments = chunk_segments(documents, chunk_size)
        together, from_before, kept, goes_on = (
            mask.repeat_interleave(heads, 0)
            for mask in (~segments.apart, segments.from_before, segments.to_end, segments.over_chunk)
        )
        scores, system = scores * together, system * together
        reach, to_end, over = reach * from_before[..., None], to_end * kept[..., None], over * goes_on[..., None]
    parts = (scores.to(dtype), system.to(dtype), (q * reach).to(dtype), (k * to_end).to(dtype))
    right = (k * reach * rate).to(dtype)
    outputs: tuple[Tensor, Tensor] = _Chunks.apply(*parts, right, over, inputs.v, inputs.beta, state, shape)
    return outputs


class _DecayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [N, K, L, D], total [N, K, L, D] in fp32 -> products of q and of k with k [N, K, L, L] in fp32"""
        q, k, total = q.contiguous(), k.contiguous(), total.contiguous()
        size, dim = q.shape[2:]
        scores, products = (total.new_empty(*q.shape[:2], size, size) for _ in range(2))
        with on_device(q):
            _kimi_products[(q.shape[0] * q.shape[1],)](
                q, k, total, scores, products, dim, size, min(dim, BLOCK_KEY), precision_of(q), num_warps=8,
                num_stages=1,
            )  # fmt: skip
        ctx.save_for_backward(q, k, total)
        return scores, products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, total = ctx.saved_tensors
        # Positions ahead have no products.
        dscores, dproducts = (grad.tril().to(q.dtype).contiguous() for grad in grads)
        size, dim = q.shape[2:]
        width = min(dim, BLOCK_KEY)
        dq, drows, dcolumns = (torch.empty_like(total) for _ in range(3))
        grid, constants = (q.shape[0] * q.shape[1], dim // width), (dim, size, width, precision_of(q))
        with on_device(q):
            _kimi_rows_backward[grid](
                k, total, dscores, dproducts, dq, drows, *constants, num_warps=8, num_stages=1
            )  # fmt: skip
            _kimi_columns_backward[grid](
                q, k, total, dscores, dproducts, dcolumns, *constants, num_warps=8, num_stages=1
            )  # fmt: skip
        dtotal = q * dq + k * (drows - dcolumns)
        return dq.to(q.dtype), (drows + dcolumns).to(k.dtype), dtotal


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        system: Tensor,
        read: Tensor,
        written: Tensor,
        right: Tensor,
        over: Tensor,
        v: Tensor,
        beta: Tensor,
        state: Tensor | None,
        shape: ChunkShape,
    ) -> tuple[Tensor, Tensor]:
        v = contiguous_channels(v)
        inverse = torch.empty_like(system, memory_format=torch.contiguous_format)
        start = None if state is None else state.float().contiguous()
        with on_device(v):
            _triangular_inverses[(shape.programs,)](system.contiguous(), inverse, shape.size, num_warps=4, num_stages=1)
            parts = _parts(shape, (scores, read, written, right, over), inverse, v, beta)
            before, last = states_of_chunks(shape, parts, start)
            o = outputs_of_chunks(shape, parts, before, v)
        ctx.save_for_backward(scores, inverse, read, written, right, over, v, beta, start)
        ctx.shape, ctx.state_dtype = shape, None if state is None else state.dtype
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        scores, inverse, read, written, right, over, v, beta, start = ctx.saved_tensors
        do, dlast = grads
        do = v.new_zeros(v.shape) if do is None else do.to(v.dtype).contiguous()
        dlast = None if dlast is None else dlast.float().contiguous()
        with on_device(v):
            parts = _parts(ctx.shape, (scores, read, written, right, over), inverse, v, beta)
            before, _ = states_of_chunks(ctx.shape, parts, start)
            x = gradients_of_chunks(ctx.shape, parts, before, inverse, v, beta.contiguous(), do, dlast)
        dstate = None if ctx.state_dtype is None else x.state.to(ctx.state_dtype)
        dbeta = x.beta.to(beta.dtype)
        return x.scores, x.system, x.read, x.written, -x.looked, x.over, x.v, dbeta, dstate, None


def _parts(
    shape: ChunkShape, parts: tuple[Tensor, ...], inverse: Tensor, v: Tensor, beta: Tensor
) -> ChunkParts:  # fmt: skip
    scores, read, written, right, over = (part.contiguous() for part in parts)
    missing = (0, shape.all_values - shape.value, 0, 0, 0, -shape.length % shape.size)
    content = F.pad((v.float() * beta.float()[..., None]).to(v.dtype), missing).movedim(2, 1)
    content = content.reshape(shape.sequences, shape.chunks, shape.size, shape.all_values)
    return ChunkParts(scores, read, written, inverse @ right, inverse @ content, over)


def _chunks(x: Tensor, shape: ChunkShape) -> Tensor:
    """[B, S, H, D] -> [B H, K, L, D], with zeros at the end and behind the last channel."""
    filled = F.pad(x, (0, shape.block_dim - shape.dim, 0, 0, 0, -shape.length % shape.size)).movedim(2, 1)
    return filled.reshape(shape.sequences, shape.chunks, shape.size, shape.block_dim)
