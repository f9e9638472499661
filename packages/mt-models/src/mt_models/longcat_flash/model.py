"""LongCat-Flash: layers of two latent attentions, in which experts run beside the second one.

x = x + attention_1(norm(x))
y = norm(x)
x = x + dense_1(y)
x = x + attention_2(norm(x))
x = x + dense_2(norm(x)) + experts(y)
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_models.blocks.decoder import attention_core
from mt_models.blocks.latent_attention import LatentAttention
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import TransformerLayer
from mt_models.longcat_flash.config import SUBLAYERS, LongcatFlashConfig


class ScaledLatentAttention(LatentAttention):
    """Latent attention whose latents of keys and values are `scale` times as long. The scale of the queries is in
    `attention_scale`."""

    latent_scale: float

    def latents(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor]:
        latents, positional = super().latents(x, angles)
        return latents * self.latent_scale, positional


class LongcatLayer(nn.Module):
    """Layer `number` of the model: [batch, sequence, hidden] -> the same."""

    def __init__(self, config: LongcatFlashConfig, context: ModelBuildContext, number: int) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(build_sublayer(config, context, number) for _ in range(SUBLAYERS))
        self.mlp = context.feed_forward("moe", config, number)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        first, second = self.sublayers
        assert isinstance(first, TransformerLayer)
        x, normed = first.input_layernorm.add(x)
        attended = first.self_attention(normed, pattern, angles, cache)
        x, normed = first.residual_and_norm(x, attended, first.attention_dropout, first.pre_mlp_layernorm)
        shortcut = self.mlp(normed)
        x = first.residual(x, first.mlp(normed), first.mlp_dropout)
        return second(x, pattern, angles, cache) + shortcut


def build_sublayer(config: LongcatFlashConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    attention = ScaledLatentAttention(config, core, ctx, remakes_heads=context.recompute.selects("mla_up_proj"))
    attention.latent_scale = config.latent_scale
    return TransformerLayer(config, core, context.feed_forward("dense", config, number), ctx, attention)


class LongcatFlashModel(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. A layer of multi-token prediction has one attention, and no experts."""

    config: LongcatFlashConfig

    def __init__(self, config: LongcatFlashConfig, context: ModelBuildContext) -> None:
        super().__init__(
            config,
            context,
            lambda number: LongcatLayer(config, context, number),
            lambda depth: build_sublayer(config, context, config.num_layers + depth),
        )


def build_longcat_flash(config: LongcatFlashConfig, context: ModelBuildContext) -> LongcatFlashModel:
    """See `ModelSpec.build`."""
    return LongcatFlashModel(config, context)
