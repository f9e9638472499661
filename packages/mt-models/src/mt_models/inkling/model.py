"""Inkling's decoder: short convolutions behind attention and feed-forward, a norm behind the token embeddings.

x = x + conv(attention(norm(x)))
x = x + conv(experts(norm(x)))            conv(y) = y + a depthwise convolution of y
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.layout import LayoutModule, ParameterLayout, ones, sequence_axes
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import block_norm
from mt_models.inkling.attention import RelativeAttention
from mt_models.inkling.config import InklingConfig
from mt_models.inkling.residual_conv import ResidualConv


class NormedEmbedding(TokenEmbedding):
    """Token embeddings with a norm behind them."""

    def __init__(self, config: InklingConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.norm = block_norm(config, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        normed: Tensor = self.norm(super().forward(tokens, position_ids))
        return normed


class OutputScale(LayoutModule):
    """x times a trained number, weight [1]."""

    weight: Tensor

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((1,), ones, partial_gradient=sequence_axes(ctx)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class InklingLayer(nn.Module):
    """Layer `number`: [batch, sequence, hidden] -> the same."""

    def __init__(self, config: InklingConfig, context: ModelBuildContext, number: int) -> None:
        super().__init__()
        ctx, hidden = context.parallel, config.hidden_size
        self.input_layernorm = block_norm(config, ctx)
        self.self_attention = build_attention(config, context, number)
        self.attention_conv = ResidualConv(hidden, config.conv_kernel, ctx, sharded=False)
        self.pre_mlp_layernorm = block_norm(config, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config, number)
        # Routers have such a number of their own.
        self.mlp_scale = None if MoEOptions(config).layers[number] else OutputScale(ctx)
        self.mlp_conv = ResidualConv(hidden, config.conv_kernel, ctx, sharded=False)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        attended = self.attention_conv(self.self_attention(normed, pattern, angles, cache), pattern, cache)
        x, normed = self.pre_mlp_layernorm.add(x, attended)
        fed = self.mlp(normed)
        if self.mlp_scale is not None:
            fed = self.mlp_scale(fed)
        summed: Tensor = x + self.mlp_conv(fed, pattern, cache)
        return summed


def build_attention(config: InklingConfig, context: ModelBuildContext, number: int) -> RelativeAttention:
    sized, window = config.of_layer(number), config.window_of(number)
    core = context.attention(
        config.attention_backend,
        num_heads=sized.num_attention_heads,
        num_query_groups=sized.query_groups,
        head_dim=sized.head_dim,
        dropout=config.attention_dropout,
        window=window,
        bias=True,
    )
    return RelativeAttention(sized, core, context.parallel, window, config.extent_of(number))


class InklingModel(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: InklingConfig

    def __init__(self, config: InklingConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, NormedEmbedding, lambda number: InklingLayer(config, context, number))

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        """No angles: what scores at these positions are multiplied by."""
        floor = self.config.log_scaling_floor
        if floor is None:
            return None
        growth = ((position_ids.float() + 1.0) / floor).clamp(min=1.0).log()
        angles = RotaryAngles(position_ids, torch.zeros(0, device=position_ids.device))
        # [B or 1, S, 1, 1]
        angles.query_scale = (1.0 + self.config.log_scaling_alpha * growth)[..., None, None]
        return angles

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x / self.config.logits_divisor)
        size = self.config.unpadded_vocab_size
        if size is None:
            return logits
        first = self.unprojected(x).own.start
        ids = torch.arange(first, first + logits.shape[-1], device=logits.device)
        return logits.masked_fill(ids >= size, float("-inf"))

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length


def build_inkling(config: InklingConfig, context: ModelBuildContext) -> InklingModel:
    """See `ModelSpec.build`."""
    return InklingModel(config, context)
