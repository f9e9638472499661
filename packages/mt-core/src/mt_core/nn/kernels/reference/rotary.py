"""Rotary position embedding (Su et al., RoFormer, 2021) of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.accumulation import widened


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of each head of the queries and of the keys, before they are rotated.

    q_weight, k_weight: [D]. zero_centered: they are multiplied by 1 + weight. q_scale: a factor of the queries.
    """

    q_weight: Tensor
    k_weight: Tensor
    q_scale: float
    eps: float
    zero_centered: bool = False


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of each head; the others pass. Returns q and k rotated, in their own dtypes.

    q: [B, S, N, D], k: [B, S, G, D], cos and sin: [B or 1, S, 1, R / 2] with R <= D, not differentiated.
    interleaved: channel pairs are neighbours (2i, 2i + 1); otherwise (i, i + R / 2).
    """
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, S, heads, D] -> the same, in x's dtype."""
    rotary_dim = 2 * cos.shape[-1]
    turned, passed = widened(x[..., :rotary_dim]), x[..., rotary_dim:]  # [..., R], [..., D - R]
    # [..., R / 2] each
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    # Interleaved pairs go back to neighbouring channels, others to the two halves.
    result = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((result.to(x.dtype), passed), dim=-1)
