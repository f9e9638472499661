"""torch's FlexAttention: any pattern without a tensor of its size, compiled to one kernel (Dong et al., 2024).

A pattern becomes a mask function, from which whole blocks of hidden scores are left out, and a score function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionCore, AttentionPattern, with_sinks
from mt_core.nn.attention_backends.patterns import PerPattern

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> bool, True where the key is seen"""
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) -> score"""


class FlexAttention:
    """An AttentionCore without dropout. attend, make_mask: flex_attention and create_block_mask, compiled or not."""

    def __init__(
        self, attend: Callable[..., Any], make_mask: Callable[..., BlockMask], logit_softcap: float | None = None
    ) -> None:
        self._attend = attend
        self._make_mask = make_mask
        self._logit_softcap = logit_softcap
        self._masks: PerPattern[BlockMask | None] = PerPattern()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: AttentionPattern,
        dropout: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out, lse = self.with_lse(q, k, v, pattern)
        return out if sinks is None else with_sinks(out, lse, sinks)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
        """-> out [B, S, N, D] and lse [B, N, S] in fp32"""
        queries, keys = q.shape[1], k.shape[1]
        pattern = pattern.over(keys)
        mask = self._masks.get(pattern, (queries, keys), lambda: self._block_mask(pattern, q, queries, keys))
        out, aux = self._attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=score_function(pattern, queries, keys, self._logit_softcap),
            block_mask=mask,
            enable_gqa=k.shape[2] < q.shape[2],
            return_aux=AuxRequest(lse=True),
        )
        return out.transpose(1, 2), aux.lse

    def _block_mask(self, pattern: AttentionPattern, q: Tensor, queries: int, keys: int) -> BlockMask | None:
        function = mask_function(pattern, keys - queries)
        if function is None:
            return None
        # Else one mask serves all samples; None broadcasts, as for heads.
        batched = pattern.segment_ids is not None or pattern.key_padding is not None
        return self._make_mask(function, len(q) if batched else None, None, queries, keys, device=q.device)


def mask_function(pattern: AttentionPattern, offset: int) -> MaskFunction | None:
    """What the pattern hides; None: nothing. offset: position of the first query among the keys."""
    parts: list[MaskFunction] = []
    if pattern.causal:
        # Traced by the compiler into one kernel: b, h, q and k are index tensors, so no Python `and`.
        parts.append(lambda b, h, q, k: k <= q + offset)
    if pattern.window is not None:
        window = pattern.window
        parts.append(lambda b, h, q, k: (q + offset - k).abs() < window)
    if pattern.segment_ids is not None:
        segments = pattern.segment_ids
        parts.append(lambda b, h, q, k: segments[b, q + offset] == segments[b, k])
    if pattern.key_padding is not None:
        padding = pattern.key_padding
        parts.append(lambda b, h, q, k: padding[b, k])
    if not parts:
        return None

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = parts[0](b, h, q, k)
        for part in parts[1:]:
            result = result & part(b, h, q, k)
        return result

    return seen


def score_function(
    pattern: AttentionPattern, queries: int, keys: int, logit_softcap: float | None
) -> ScoreFunction | None:
    """What the pattern adds to scores, after the soft cap; None: nothing."""
    slopes, bias, offset = pattern.alibi_slopes, pattern.bias_over(queries, keys), keys - queries
    if slopes is None and bias is None and logit_softcap is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if logit_softcap is not None:
            score = logit_softcap * torch.tanh(score / logit_softcap)
        if slopes is not None:
            score = score - slopes[h] * (q + offset - k)
        if bias is not None:
            score = score + bias[b if bias.shape[0] > 1 else 0, h, q, k]
        return score

    return change


# -- registration ----------------------------------------------------------------------------------


def supports_flex(request: AttentionRequest) -> bool | str:
    if request.device_type != "cuda":
        return f"its backward runs on cuda only, not on {request.device_type}"
    if request.dropout > 0:
        return "it has no dropout"
    if request.deterministic:
        return "its backward adds in no fixed order; deterministic runs need eager"
    if request.head_dim < 16:
        return f"its heads are at least 16 wide, not {request.head_dim}"
    return True


def build_flex(request: AttentionRequest, *, softmax_in_fp32: bool = True) -> AttentionCore:
    # Not compiled, flex_attention materializes the scores.
    return FlexAttention(torch.compile(flex_attention), torch.compile(create_block_mask), request.logit_softcap)
