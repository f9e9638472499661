"""Reference of the scores of an indexer (DeepSeek-V3.2) in plain torch.

Shapes: B batch, S queries, T keys, H heads, D channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [B, S, H, D], weights [B, S, H], keys [B, T, D] -> [B, S, T] in fp32: sums over heads of
    weights relu(queries . keys / sqrt(D))."""
    products = queries.float() @ keys.float().transpose(-1, -2).unsqueeze(1)  # [B, S, H, T]
    products = F.relu(products * queries.shape[-1] ** -0.5)
    return (weights.float().unsqueeze(-2) @ products).squeeze(-2)
