# mypy: disable-error-code="no-untyped-def"
"""Scores of an indexer (DeepSeek-V3.2): sums over heads of weights times relu of products, without gradients.

A program computes a tile of queries and keys: it reads the keys once and adds one head after the other, so that the
products of all heads are never in memory.

Shapes: B batch, S queries, T keys, H heads, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device

QUERIES, KEYS = 64, 64
FEW = 16
"""Queries of a tile where there are no more of them, as in a decode step. tl.dot takes 16 at least."""


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


def triton_index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The same as `mt_models.blocks.indexer.index_scores`, for queries and keys of one dtype and at most
    WIDEST_KERNEL channels."""
    queries, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys))
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
                dim, max(int(triton.next_power_of_2(dim)), 16), tile, KEYS, num_warps=4, num_stages=2,
            )  # fmt: skip
    return scores
