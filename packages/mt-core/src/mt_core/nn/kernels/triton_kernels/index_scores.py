# mypy: disable-error-code="no-untyped-def"
"""Scores of an indexer (DeepSeek-V3.2): sums over heads of weights times relu of products.

A program computes a tile of queries and keys: it reads the keys once and adds one head after the other, so that the
products of all heads are never in memory. Backward multiplies again what it needs of them: a program has the queries
of a head and goes through the keys, for the gradients of queries and weights; another has the keys and goes through
queries and heads, for the gradient of keys.

Shapes: B batch, S queries, T keys, H heads, D channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device

QUERIES, KEYS = 64, 64
FEW = 16
"""Queries of a tile where there are no more of them, as in a decode step. tl.dot takes 16 at least."""
PROGRAMS = 264
"""Programs that the backward pass of keys has at least, two for each multiprocessor of an H100, if there are heads
enough to divide among them."""


@triton.jit
def _index_scores(
    q, w, k, scores, queries, keys, heads, scale,
    q_row, q_position, q_head, w_row, w_position, w_head, k_row, k_position,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """scores [B, S, T] in fp32"""
    row = tl.program_id(2).to(tl.int64)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    channel = tl.arange(0, BLOCK_DIM)
    query_mask, key_mask = query < queries, key < keys
    # int64: offsets of long sequences with many heads pass 2^31.
    at, place = query.to(tl.int64), key.to(tl.int64)
    key_tile = tl.load(
        k + row * k_row + place[None, :] * k_position + channel[:, None],
        mask=key_mask[None, :] & (channel < DIM)[:, None], other=0.0,
    )  # fmt: skip
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for head in range(heads):
        query_tile = tl.load(
            q + row * q_row + at[:, None] * q_position + head * q_head + channel[None, :],
            mask=query_mask[:, None] & (channel < DIM)[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(w + row * w_row + at * w_position + head * w_head, mask=query_mask, other=0.0).to(tl.float32)
        # ieee: without TF32 for fp32 inputs. Products of bf16 are exact in fp32, in which they are summed.
        product = tl.dot(query_tile, key_tile, input_precision="ieee") * scale
        total += weight[:, None] * tl.maximum(product, 0.0)
    out = scores + (row * queries + at[:, None]) * keys + place[None, :]
    tl.store(out, total, mask=query_mask[:, None] & key_mask[None, :])


@triton.jit
def _index_queries_backward(
    q, w, k, grads, dq, dw, queries, keys, heads, scale,
    q_row, q_position, q_head, w_row, w_position, w_head, k_row, k_position,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """grads [B, S, T] in fp32; dq [B, S, H, D], dw [B, S, H], contiguous"""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(0)
    query, channel = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK_DIM)
    query_mask, channel_mask = query < queries, channel < DIM
    at = query.to(tl.int64)
    inside = query_mask[:, None] & channel_mask[None, :]
    query_tile = tl.load(
        q + row * q_row + at[:, None] * q_position + head * q_head + channel[None, :], mask=inside, other=0.0
    )
    weight = tl.load(w + row * w_row + at * w_position + head * w_head, mask=query_mask, other=0.0).to(tl.float32)
    grad_of_query = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    grad_of_weight = tl.zeros([QUERIES], tl.float32)
    for first in range(0, keys, KEYS):
        place = (first + tl.arange(0, KEYS)).to(tl.int64)
        key_mask = place < keys
        key_tile = tl.load(
            k + row * k_row + place[:, None] * k_position + channel[None, :],
            mask=key_mask[:, None] & channel_mask[None, :], other=0.0,
        )  # fmt: skip
        grad = tl.load(
            grads + (row * queries + at[:, None]) * keys + place[None, :],
            mask=query_mask[:, None] & key_mask[None, :], other=0.0,
        )  # fmt: skip
        product = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale
        grad_of_weight += tl.sum(grad * tl.maximum(product, 0.0), 1)
        # relu has the gradient 0 at 0, as torch's.
        of_product = tl.where(product > 0.0, grad * weight[:, None], 0.0)
        grad_of_query = tl.dot(of_product.to(key_tile.dtype), key_tile, grad_of_query, input_precision="ieee")
    place_of_head = (row * queries + at) * heads + head
    tl.store(dw + place_of_head, grad_of_weight, mask=query_mask)
    tl.store(dq + place_of_head[:, None] * DIM + channel[None, :], grad_of_query * scale, mask=inside)


@triton.jit
def _index_keys_backward(
    q, w, k, grads, parts, queries, keys, heads, scale, heads_of_part,
    q_row, q_position, q_head, w_row, w_position, w_head, k_row, k_position,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """grads [B, S, T] in fp32; parts [P, B, T, D] in fp32: gradients of keys through heads_of_part heads each"""
    row, part = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    key, channel = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK_DIM)
    key_mask, channel_mask = key < keys, channel < DIM
    place = key.to(tl.int64)
    inside = key_mask[:, None] & channel_mask[None, :]
    key_tile = tl.load(k + row * k_row + place[:, None] * k_position + channel[None, :], mask=inside, other=0.0)
    total = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    for first in range(0, queries, QUERIES):
        at = (first + tl.arange(0, QUERIES)).to(tl.int64)
        query_mask = at < queries
        grad = tl.load(
            grads + (row * queries + at[None, :]) * keys + place[:, None],
            mask=query_mask[None, :] & key_mask[:, None], other=0.0,
        )  # fmt: skip
        for head in range(part * heads_of_part, tl.minimum((part + 1) * heads_of_part, heads)):
            query_tile = tl.load(
                q + row * q_row + at[:, None] * q_position + head * q_head + channel[None, :],
                mask=query_mask[:, None] & channel_mask[None, :], other=0.0,
            )  # fmt: skip
            weight = tl.load(w + row * w_row + at * w_position + head * w_head, mask=query_mask, other=0.0)
            product = tl.dot(key_tile, tl.trans(query_tile), input_precision="ieee") * scale
            of_product = tl.where(product > 0.0, grad * weight.to(tl.float32)[None, :], 0.0)
            total = tl.dot(of_product.to(query_tile.dtype), query_tile, total, input_precision="ieee")
    out = parts + ((part * tl.num_programs(2) + row) * keys + place[:, None]) * DIM + channel[None, :]
    tl.store(out, total * scale, mask=inside)


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Same as mt_core.nn.kernels.reference.index_scores.index_scores; keys are multiplied in the dtype of queries."""
    scores: Tensor = _IndexScores.apply(queries, weights, keys.to(queries.dtype))
    return scores


class _IndexScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        queries, keys = _with_dense_channels(queries), _with_dense_channels(keys)
        ctx.save_for_backward(queries, weights, keys)
        return scores_alone(queries, weights, keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        queries, weights, keys = ctx.saved_tensors
        of_scores = grads[0].float().contiguous()
        dq, dw = _gradients_of_queries(queries, weights, keys, of_scores)
        return dq, dw, _gradient_of_keys(queries, weights, keys, of_scores)


def _gradients_of_queries(queries: Tensor, weights: Tensor, keys: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    batch, count, heads, dim = queries.shape
    dq, dw = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries, weights))
    if dw.numel():
        with on_device(queries):
            _index_queries_backward[(heads, triton.cdiv(count, QUERIES), batch)](
                queries, weights, keys, grads, dq, dw, count, keys.shape[1], heads, dim**-0.5,
                *queries.stride()[:3], *weights.stride(), *keys.stride()[:2],
                dim, _padded(dim), QUERIES, KEYS, num_warps=4, num_stages=2,
            )  # fmt: skip
    return dq, dw


def _gradient_of_keys(queries: Tensor, weights: Tensor, keys: Tensor, grads: Tensor) -> Tensor:
    batch, count, heads, dim = queries.shape
    tiles = triton.cdiv(keys.shape[1], KEYS)
    heads_of_part = triton.cdiv(heads, min(heads, triton.cdiv(PROGRAMS, max(tiles * batch, 1))))
    parts = keys.new_empty(triton.cdiv(heads, heads_of_part), *keys.shape, dtype=torch.float32)
    if parts.numel():
        with on_device(queries):
            _index_keys_backward[(tiles, parts.shape[0], batch)](
                queries, weights, keys, grads, parts, count, keys.shape[1], heads, dim**-0.5, heads_of_part,
                *queries.stride()[:3], *weights.stride(), *keys.stride()[:2],
                dim, _padded(dim), QUERIES, KEYS, num_warps=4, num_stages=2,
            )  # fmt: skip
    return parts.sum(0).to(keys.dtype)


def _padded(dim: int) -> int:
    return max(int(triton.next_power_of_2(dim)), 16)


def _with_dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def scores_alone(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The same without gradients, for queries and keys of one dtype."""
    queries, keys = _with_dense_channels(queries), _with_dense_channels(keys)
    batch, count, heads, dim = queries.shape
    scores = torch.empty(batch, count, keys.shape[1], dtype=torch.float32, device=queries.device)
    # Products of fp32 are taken without tensor cores, from registers, which a large tile would not fit into.
    tile = FEW if count <= FEW or queries.dtype == torch.float32 else QUERIES
    grid = (triton.cdiv(keys.shape[1], KEYS), triton.cdiv(count, tile), batch)
    if scores.numel():
        with on_device(queries):
            _index_scores[grid](
                queries, weights, keys, scores, count, keys.shape[1], heads, dim**-0.5,
                *queries.stride()[:3], *weights.stride(), *keys.stride()[:2],
                dim, _padded(dim), tile, KEYS, num_warps=4, num_stages=2,
            )  # fmt: skip
    return scores
