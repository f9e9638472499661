"""Multi-head latent attention without positions, with a gate of each channel of a head: linear_proj(o sigmoid(W x))
(Kimi K3, 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.latent_attention import LatentAttentionConfigLike, UnrotatedLatentAttention


class ChannelGatedLatentAttention(UnrotatedLatentAttention):
    """Rows of linear_gate are the channels of the values of each head, one head after the other, sharded by heads."""

    def __init__(
        self,
        config: LatentAttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        *,
        remakes_heads: bool = False,
    ) -> None:
        super().__init__(config, core, ctx, remakes_heads=remakes_heads)
        width = config.num_attention_heads * config.v_head_dim
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size, width, ctx, bias=False, init=normal(config.init_method_std)
        )

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear_gate(x)).unflatten(-1, (-1, self.value))
        return super().output(heads * gate, x)
