"""The attention core: softmax(Q K^T / sqrt(d)) V, computed by interchangeable backends.

Shapes: B batch, S query positions, T key positions, N query heads, G key-value groups (G divides N), D
head size. Queries are [B, S, N, D], keys and values [B, T, G, D], the result [B, S, N, D]. When T > S causal
queries are the last S of the T positions (decoding with a cache); without causality queries and keys may be
of two sequences (cross attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.interfaces import AttentionRequest

Bias = Tensor | Callable[[int, int], Tensor]
"""[1 or B, N, S, T], or the function that gives it for (S, T): the last S of T positions."""


@dataclass
class AttentionPattern:
    """Which keys a query sees, and what is added to its scores. One object serves all layers of a forward.

    segment_ids: [B, T] document numbers; a query sees its own only. alibi_slopes: [N]. key_padding: [B, T] bool,
    True for keys that are seen; each query has to see one. bias: added to the scores.
    window: a query sees keys at a distance below it (itself and the window - 1 before it).
    """

    causal: bool = True
    segment_ids: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_padding: Tensor | None = None
    bias: Bias | None = None
    window: int | None = None
    _mask: Tensor | None = None
    _within: dict[int | None, AttentionPattern] = field(default_factory=dict)

    def within(self, window: int | None) -> AttentionPattern:
        """This pattern narrowed to a window: layers may differ in theirs, and each kind's mask is built once."""
        return self if window is None else self._with_window(window)

    def over(self, keys: int) -> AttentionPattern:
        """The same over this many keys: a window that reaches all of them is none."""
        return self if self.window is None or self.window < keys else self._with_window(None)

    def _with_window(self, window: int | None) -> AttentionPattern:
        if window == self.window:
            return self
        if window not in self._within:
            self._within[window] = replace(self, window=window, _mask=None, _within={})
        return self._within[window]

    @property
    def is_plain(self) -> bool:
        """Neither mask nor bias, apart from causality."""
        return all(x is None for x in (self.segment_ids, self.alibi_slopes, self.key_padding, self.bias, self.window))

    @property
    def is_plain_causal(self) -> bool:
        return self.causal and self.is_plain

    def bias_over(self, queries: int, keys: int) -> Tensor | None:
        """[1 or B, N, S, T]"""
        return self.bias if self.bias is None or isinstance(self.bias, Tensor) else self.bias(queries, keys)

    def additive_mask(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[B or 1, N or 1, S, T]: 0 or the bias where a query sees a key, -inf elsewhere. Built once."""
        # The layers of a forward pass share dtype and device, so only the sizes are compared.
        if self._mask is None or self._mask.shape[-2:] != (queries, keys):
            self._mask = self._build_mask(queries, keys, dtype, device)
        return self._mask

    def _build_mask(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[B or 1, N or 1, S, T]. S queries are the last of T positions."""
        query_positions = torch.arange(keys - queries, keys, device=device)  # [S], the last S of T
        distance = query_positions[:, None] - torch.arange(keys, device=device)[None, :]  # [S, T]
        hidden = (distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool))[None, None]
        if self.window is not None:
            hidden = hidden | (distance.abs() >= self.window)
        if self.segment_ids is not None:
            same_segment = self.segment_ids[:, keys - queries :, None] == self.segment_ids[:, None, :]  # [B, S, T]
            hidden = hidden | ~same_segment[:, None]
        if self.key_padding is not None:
            hidden = hidden | ~self.key_padding[:, None, None, :]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        if self.alibi_slopes is not None:
            mask = mask - self.alibi_slopes.to(dtype)[None, :, None, None] * distance.to(dtype)  # [1, N, S, T]
        mask = mask.masked_fill(hidden, float("-inf"))
        # Added last: addition saves no tensors for backward, and recomputed layers reuse the cached mask.
        bias = self.bias_over(queries, keys)
        return mask if bias is None else mask + bias.to(dtype)


AttentionCore = Callable[..., Tensor]
"""(q, k, v, pattern, dropout probability) -> [B, S, N, D]; dropout is 0 outside training.

One that serves requests with `sinks` is given them as a sixth argument, [N]: see `with_sinks`.
"""


def expand_groups(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, G, D] -> [B, T, N, D]: each group's keys or values serve N / G query heads."""
    groups = x.shape[2]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=2)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention sinks: the softmax denominator of each head has one more term, exp(sink), without a value.

    (Xiao et al., 2023, with a trained score in place of a token.) out [B, S, N, D] and lse [B, N, S] of the scores
    without it; sinks [N]. The weights of the keys, and so the result, are multiplied by
    exp(lse) / (exp(lse) + exp(sink)).
    """
    # logsigmoid form: the gradient does not underflow when a sink is far below the scores.
    kept = F.logsigmoid(lse - sinks.to(lse.dtype)[None, :, None]).exp()  # [B, N, S]
    return out * kept.transpose(1, 2)[..., None].to(out.dtype)


def eager_attention(*, softmax_in_fp32: bool = True, logit_softcap: float | None = None) -> AttentionCore:
    """Reference attention in plain torch, with every intermediate tensor materialized.

    logit_softcap: scores s become c tanh(s / c) before anything is masked (Gemma 2).
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float, sinks: Tensor | None = None
    ) -> Tensor:
        heads = q.shape[2]
        k, v = expand_groups(k, heads), expand_groups(v, heads)
        scores = torch.einsum("bsnd,btnd->bnst", q, k)  # [B, N, S, T]
        scores = (scores.float() if softmax_in_fp32 else scores) / math.sqrt(q.shape[-1])
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        scores = scores + pattern.additive_mask(q.shape[1], k.shape[1], scores.dtype, q.device)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        out = torch.einsum("bnst,btnd->bsnd", F.dropout(weights, dropout), v)
        return out if sinks is None else with_sinks(out, torch.logsumexp(scores, dim=-1), sinks)

    return attend


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
    """torch's scaled_dot_product_attention, whose fused kernels materialize no S x T tensor."""
    heads, queries, keys = q.shape[2], q.shape[1], k.shape[1]
    pattern = pattern.over(keys)
    # torch's is_causal aligns queries with the first keys, patterns here with the last: the same only for S = T.
    causal = pattern.is_plain_causal and queries == keys
    # A single query in plain causal attention is the last position: it sees every key.
    unmasked = pattern.is_plain and (queries == 1 or not pattern.causal)
    if unmasked and queries == 1 and k.shape[2] < heads:
        return _single_query(q, k, v, dropout)
    # On a GPU any mask excludes the flash kernel, so the cases that need none are found first.
    mask = None if causal or unmasked else pattern.additive_mask(queries, keys, q.dtype, q.device)
    grouped = k.shape[2] < heads and serves_groups(q, mask)
    if not grouped:
        k, v = expand_groups(k, heads), expand_groups(v, heads)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


def serves_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's fused kernels take fewer key-value heads than query heads: cuDNN's and the flash kernel do. The
    kernel that remains for masks and for fp32 does not, and torch would materialize the scores."""
    return q.is_cuda and mask is None and q.dtype in (torch.float16, torch.bfloat16)


def _single_query(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """One query without a mask: the heads of a group are as many queries of its keys, which are not repeated."""
    rows = q.squeeze(1).unflatten(1, (k.shape[2], -1))  # [B, G, N / G, D]
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), dropout_p=dropout)
    return out.flatten(1, 2).unsqueeze(1)


# -- registration ----------------------------------------------------------------------------------


def supports_eager(request: AttentionRequest) -> bool | str:
    return True


def supports_sdpa(request: AttentionRequest) -> bool | str:
    if request.deterministic and request.device_type == "cuda":
        return "its backward on cuda adds in no fixed order; deterministic runs need eager"
    if request.logit_softcap is not None:
        return "it has no soft cap on the scores"
    if request.sinks:
        return "it does not return the log-sum-exp of its scores, to which a sink adds a term"
    return True


def build_eager(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    return eager_attention(softmax_in_fp32=softmax_in_fp32, logit_softcap=request.logit_softcap)


def build_sdpa(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    return sdpa_attention
