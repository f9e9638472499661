"""Layers with a norm before and a norm behind attention and feed-forward: x + norm(f(norm(x)))."""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import LayerConfigLike, TransformerLayer, block_norm


class SandwichLayer(TransformerLayer):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))): [batch, sequence, hidden] -> the same.

    The residual stream itself is never normalized. The norms are the configured ones.
    """

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        attention: nn.Module | None = None,
    ) -> None:
        super().__init__(config, core, feed_forward, ctx, attention)
        self.post_self_attn_layernorm = block_norm(config, ctx)
        self.post_mlp_layernorm = block_norm(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        attended = self.post_self_attn_layernorm(self.self_attention(normed, pattern, angles, cache))
        x, normed = self.residual_and_norm(x, attended, self.attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.post_mlp_layernorm(self.mlp(normed)), self.mlp_dropout)
