"""The softmax of attention scores, for backends that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.accumulation import widened


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
