"""Kernels of layers in plain torch: norms, rotary embedding, softmax, activations, residual sums.

All compute in fp32, or in their input's dtype if that is wider, and return their input's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.activations import activate


def widened(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# -- norms: LayerNorm (Ba et al., 2016) and RMSNorm (Zhang and Sennrich, 2019) ---------------------------


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, [..., H] in x's dtype.

    Computed in fp32 or wider. zero_centered: the factor is 1 + weight.
    """
    scale = widened(weight) + 1 if zero_centered else widened(weight)
    return F.layer_norm(widened(x), weight.shape, scale, widened(bias), eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [..., H] in x's dtype; computed in fp32 or wider.

    zero_centered: the factor is 1 + weight.
    """
    scale = widened(weight) + 1 if zero_centered else widened(weight)
    return F.rms_norm(widened(x), weight.shape, scale, eps).to(x.dtype)


def scaled_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y / sqrt(mean(y^2) + eps) of y = x * (1 + weight) over the last dimension, [..., H] in x's dtype, to which y is
    rounded; computed in fp32 or wider."""
    scaled = (widened(x) * (1 + widened(weight))).to(x.dtype)
    return F.rms_norm(widened(scaled), weight.shape, eps=eps).to(x.dtype)


# -- rotary position embedding (Su et al., RoFormer, 2021) ------------------------------------------------


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


# -- softmax of attention scores, for backends that hold them ---------------------------------------------


def scaled_masked_softmax(scores: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(scale * scores) over the last dimension: [B, N, S, T] -> the same, in scores' dtype, taken in fp32.

    mask: bool [B or 1, N or 1, S or 1, T], True where a key is seen. causal: the queries are the last S of the T
    positions, and see none behind their own. A row that sees no key is 0.
    """
    queries, keys = scores.shape[-2:]
    scaled = widened(scores) * scale
    hidden = torch.zeros(1, 1, 1, keys, dtype=torch.bool, device=scores.device) if mask is None else ~mask
    if causal:
        # Query i is position keys - queries + i.
        hidden = hidden | torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    blind = hidden.all(-1, keepdim=True)
    # A row of -inf alone gives NaN: such rows keep their scores here and are set to 0 afterwards.
    weights = torch.softmax(scaled.masked_fill(hidden & ~blind, float("-inf")), dim=-1)
    return weights.masked_fill(blind, 0.0).to(scores.dtype)


# -- activations of the feed-forward: the gated ones and the squared ReLU ---------------------------------

FusedActivation = Literal["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"]


def activation(x: Tensor, bias: Tensor | None, name: FusedActivation) -> Tensor:
    """The activation of x + bias, in x's dtype; computed in fp32 or wider.

    Gated: x [..., 2F] and bias [2F], gate half then up half -> [..., F]. squared_relu: [..., F] -> [..., F].
    """
    # The bias is added in fp32, so the sum is not rounded before the activation.
    wide = widened(x) if bias is None else widened(x) + widened(bias)
    return activate(name, wide).to(x.dtype)


# -- the end of each block: bias, dropout, and the sum with the residual stream ---------------------------


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
    """residual + dropout(x + bias): x and residual [..., H], bias [H] -> [..., H] in residual's dtype.

    probability: of an element to be dropped, the others being divided by 1 - probability; 0 outside training.
    Implementations draw from torch's stream of the device, each in its own way.
    """
    # F.dropout's training=True: outside training the caller passes the probability 0.
    return residual + F.dropout(x if bias is None else x + bias, probability)
