"""Kimi K3: layers of Kimi delta attention or of gated latent attention without positions, and of feed-forwards, dense
or with experts that work on latents. Each block reads a weighted mean of sums of earlier outputs
(`mt_models.blocks.attention_residual`):

    x = norm(mean of sources)      last source <- last source + block(x)

A layer with which a run begins makes the output of its attention a new last source instead.
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention_residual import AttentionResidual, ResidualOutput, with_new_run, with_output
from mt_models.blocks.channel_gated_latent_attention import ChannelGatedLatentAttention
from mt_models.blocks.decoder import RotaryDecoder, attention_core
from mt_models.blocks.kimi_delta_net import FullGateKimiDeltaNet
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import block_norm
from mt_models.kimi_k3.config import KimiK3Config


class KimiK3Layer(nn.Module):
    """Layer `number`: sources [B, S, n H] -> [B, S, (n + 1) H] if a run begins with it, else [B, S, n H]."""

    def __init__(self, config: KimiK3Config, context: ModelBuildContext, number: int, *, linear: bool) -> None:
        super().__init__()
        ctx = context.parallel
        self.begins_run = config.begins_run(number)
        # Layer 0 reads the embedding alone, of which any weighted mean is the embedding; published files have its
        # parameters too.
        self.attention_residual = _residual(config, ctx)
        self.input_layernorm = block_norm(config, ctx)
        self.self_attention = _delta_net(config, ctx) if linear else _latent_attention(config, context)
        self.mlp_residual = _residual(config, ctx)
        self.pre_mlp_layernorm = block_norm(config, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config, number)

    def forward(
        self,
        sources: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x = self.input_layernorm(self.attention_residual(sources))
        attended = self.self_attention(x, pattern, angles, cache)
        sources = with_new_run(sources, attended) if self.begins_run else with_output(sources, attended)
        x = self.pre_mlp_layernorm(self.mlp_residual(sources))
        return with_output(sources, self.mlp(x))


def _residual(config: KimiK3Config, ctx: ParallelContext) -> AttentionResidual:
    return AttentionResidual(config.hidden_size, config.norm_epsilon, ctx)


def _delta_net(config: KimiK3Config, ctx: ParallelContext) -> nn.Module:
    return FullGateKimiDeltaNet(config, ctx, lower_bound=config.linear_decay_lower_bound, fp32_taps=True)


def _latent_attention(config: KimiK3Config, context: ModelBuildContext) -> nn.Module:
    remakes = context.recompute.selects("mla_up_proj")
    core = attention_core(config, context)
    return ChannelGatedLatentAttention(config, core, context.parallel, remakes_heads=remakes)


class KimiK3Model(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. Between layers and pipeline stages are sources [B, S, n H]."""

    def __init__(self, config: KimiK3Config, context: ModelBuildContext) -> None:
        linear, ctx = config.linear_layers, context.parallel
        super().__init__(
            config,
            context,
            lambda number: KimiK3Layer(config, context, number, linear=linear[number]),
            lambda: ResidualOutput(_residual(config, ctx), block_norm(config, ctx)),
        )


def build_kimi_k3(config: KimiK3Config, context: ModelBuildContext) -> KimiK3Model:
    """See `ModelSpec.build`."""
    return KimiK3Model(config, context)
