"""Loss of an indexer (DeepSeek-V3.2, 2025): its scores learn how the attention of its layer spreads over keys.

With p_ts the attention weights of query t, averaged over the heads, and I_ts the scores of the indexer:

    loss = mean over t of KL(p_t || softmax(I_t))

over all keys that t sees (dense warm-up), or over those that were chosen for it (sparse training). p has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import all_reduce, reduce_from, reduce_scatter
from mt_core.parallel.context import ParallelContext

WEIGHTS_AT_ONCE = 2**26
"""Attention weights that are in memory at a time (fp32)."""


@torch.no_grad()
def mean_attention(queries: Tensor, keys: Tensor, allowed: Tensor, heads: int, ctx: ParallelContext) -> Tensor:
    """p [B, S, T] in fp32: attention weights averaged over all heads of the layer; S: under sequence parallelism this
    rank's positions.

    queries [B, S, N, D], keys [B, T, N, D] of this rank's heads, allowed [B or 1, S, T] bool, of all positions.
    """
    batch, _, local_heads, size = queries.shape
    rows = max(WEIGHTS_AT_ONCE // (batch * local_heads * keys.shape[1]), 1)
    transposed = keys.float().permute(0, 2, 3, 1)  # [B, N, D, T]
    total = torch.cat(
        [
            _attention_sum(q, transposed, mask, size)
            for q, mask in zip(queries.split(rows, 1), allowed.split(rows, 1), strict=True)
        ],
        1,
    )
    if ctx.tp.size > 1:
        total = reduce_scatter(total, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else all_reduce(total, ctx.tp)
    return total / heads


def _attention_sum(queries: Tensor, keys: Tensor, allowed: Tensor, size: int) -> Tensor:
    """[B, S, N, D] and [B, N, D, T] -> weights summed over N, [B, S, T]"""
    scores = queries.float().transpose(1, 2) @ keys * size**-0.5  # [B, N, S, T]
    return scores.masked_fill(~allowed.unsqueeze(1), float("-inf")).softmax(-1).sum(1)


def _divergence(target: Tensor, log_predicted: Tensor) -> Tensor:
    """p log(p / q) - p + q of each key; the sum of -p + q over the keys is 0."""
    # Of a trained indexer p / q is nearly 1, and the sum of p log(p / q) a small number from large ones. With r = p / q
    # the term is p (log r + exp(-log r) - 1), about p (log r)^2 / 2. Where p is far below q, exp(-log r) is not finite.
    log_ratio = target.clamp_min(torch.finfo(target.dtype).tiny).log() - log_predicted
    near = log_ratio > -1.0
    excess = torch.where(near, target * torch.expm1(-log_ratio.masked_fill(~near, 0.0)), log_predicted.exp() - target)
    return target * log_ratio + excess


def indexer_loss(scores: Tensor, target: Tensor, allowed: Tensor, ctx: ParallelContext) -> Tensor:
    """scores, target [B, S, T], allowed [B or 1, S, T] bool -> the loss, the same number on every tensor-parallel rank.
    Under sequence parallelism S are this rank's positions, of which it has the gradient."""
    log_predicted = scores.masked_fill(~allowed, float("-inf")).log_softmax(-1).masked_fill(~allowed, 0.0)
    divergence = _divergence(target, log_predicted).masked_fill(~allowed, 0.0).sum()
    positions = scores.shape[0] * scores.shape[1]
    if ctx.sequence_parallel:
        divergence, positions = reduce_from(divergence, ctx.tp), positions * ctx.tp.size
    return divergence / positions
