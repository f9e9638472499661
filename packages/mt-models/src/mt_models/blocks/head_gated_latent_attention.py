"""Multi-head latent attention with a gate of each head: the output of head n is multiplied by sigmoid(w_n x) before the
output projection (Ling 3.0, 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.latent_attention import LatentAttention, LatentAttentionConfigLike


class HeadGatedLatentAttention(LatentAttention):
    """Rows of linear_gate are the heads, sharded as they are."""

    def __init__(
        self,
        config: LatentAttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        *,
        remakes_heads: bool = False,
    ) -> None:
        super().__init__(config, core, ctx, remakes_heads=remakes_heads)
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size, config.num_attention_heads, ctx, bias=False, init=normal(config.init_method_std)
        )

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear_gate(x).float()).to(heads.dtype)
        return super().output(heads * gate.unsqueeze(-1), x)
