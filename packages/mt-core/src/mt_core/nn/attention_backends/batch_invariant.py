"""Attention whose result for a query depends on its own keys only, to the last bit (see mt_core.nn.batch_invariance).

Keys are taken in blocks of fixed size from the first position on, by an online softmax (Milakov and Gimelshein, 2018):
blocks that a query does not see multiply what it has by 1 and add 0. Shapes are those of mt_core.nn.attention.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionCore, AttentionPattern, expand_groups, with_sinks
from mt_core.nn.batch_invariance import batch_invariant

KEYS = 64
"""Keys of a block. A cache gives keys from a multiple of it on."""


def batch_invariant_attention(logit_softcap: float | None = None) -> AttentionCore:
    """Computes in fp32 whatever the dtype, and is differentiable. logit_softcap: as eager attention."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, sinks: Tensor | None = None
    ) -> Tensor:
        with batch_invariant():
            out, lse = _online(q, k, v, pattern, dropout, logit_softcap)
            return (out if sinks is None else with_sinks(out, lse, sinks)).to(q.dtype)

    return attend


def _online(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, logit_softcap: float | None
) -> tuple[Tensor, Tensor]:
    """-> [B, S, N, D] and the log-sum-exp of the scores [B, N, S], in fp32"""
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    mask = pattern.over(keys).additive_mask(queries, keys, torch.float32, q.device)  # [B or 1, N or 1, S, T]
    mask = F.pad(mask, (0, -keys % KEYS), value=-math.inf)  # keys that fill the last block are hidden
    rows = _by_head(q) / math.sqrt(q.shape[-1])  # [B N, S, D]
    columns, values = (_by_head(_filled(expand_groups(x, heads))) for x in (k, v))
    # A column of ones beside the values adds up the weights.
    values = torch.cat([values, values.new_ones((*values.shape[:2], 1))], -1)
    largest = rows.new_full((batch * heads, queries, 1), -math.inf)  # [B N, S, 1]
    total = rows.new_zeros((batch * heads, queries, values.shape[-1]))  # [B N, S, D + 1]
    # From the first key on, so that a query sums its keys in the same blocks whatever comes after them.
    for first in range(0, columns.shape[1], KEYS):
        block = slice(first, first + KEYS)
        scores = torch.bmm(rows, columns[:, block].transpose(1, 2))
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        scores = scores.unflatten(0, (batch, heads)) + mask[..., block]
        scores = scores.flatten(0, 1)
        # Detached: the maximum cancels in the result, so it has no gradient.
        reached = torch.maximum(largest, scores.amax(-1, keepdim=True).detach())
        # Where nothing is seen yet the largest score is -inf, and any finite number will do.
        base = reached.masked_fill(reached == -math.inf, 0.0)
        weights = (scores - base).exp()
        added = torch.bmm(weights, values[:, block])
        if dropout > 0:
            # Of the values alone: dropout comes behind the softmax, whose denominator has all keys.
            dropped = torch.bmm(F.dropout(weights, dropout), values[:, block])
            added = torch.cat([dropped[..., :-1], added[..., -1:]], -1)
        total = total * (largest - base).exp() + added
        largest = reached
    sums = total[..., -1:]
    out = (total[..., :-1] / sums).unflatten(0, (batch, heads)).transpose(1, 2)
    lse = (sums.log() + largest).squeeze(-1).unflatten(0, (batch, heads))
    return out, lse


def _by_head(x: Tensor) -> Tensor:
    """[B, T, N, D] -> [B N, T, D] in fp32"""
    return x.float().transpose(1, 2).flatten(0, 1)


def _filled(x: Tensor) -> Tensor:
    """[B, T, N, D] with T filled up to whole blocks"""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % KEYS))


# -- registration ----------------------------------------------------------------------------------


def supports_batch_invariant(request: AttentionRequest) -> bool | str:
    if request.device_type != "cpu":
        return f"it relies on the matrix products of CPUs, not of {request.device_type}"
    return True


def build_batch_invariant(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    return batch_invariant_attention(request.logit_softcap)
