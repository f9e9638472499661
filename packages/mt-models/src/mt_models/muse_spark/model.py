"""Muse Spark's decoder: that of Muse Glimmer with other residual connections, and experts on a latent of the tokens.

    x = gate(x, attention(norm(x)) / rms)
    x = gate(x, y / rms), y = (1 + w) feed_forward(norm(x))

gate(x, y) = alpha x + beta y in each channel, with beta = sigmoid(g / T) and alpha^2 = (1 - beta)(1 + beta), so that
alpha^2 + beta^2 = 1. The output of each head is divided by its root mean square before the gate of attention.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.kernels.reference.layers import scaled_rms_norm
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes, zeros
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.decoder import attention_core
from mt_models.blocks.norm import ScaleFreeRMSNorm, ZeroCenteredRMSNorm
from mt_models.blocks.rotary import RotaryAngles
from mt_models.muse_glimmer.model import MuseGlimmerAttention, MuseGlimmerModel
from mt_models.muse_spark.config import MuseSparkConfig

SMALLEST_SHARE = 1e-3
"""The least square of a channel's factor of the residual stream."""


class MuseSparkAttention(MuseGlimmerAttention):
    """Attention of layer `number`, whose heads' outputs are divided by their root mean squares."""

    def __init__(self, config: MuseSparkConfig, core: AttentionCore, ctx: ParallelContext, number: int) -> None:
        super().__init__(config, core, ctx, number)
        self.output_norm = ScaleFreeRMSNorm(config.norm_epsilon)

    def attend_or_decode(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, cache: Cache | None
    ) -> Tensor:
        """[B, S, N, D]"""
        normed: Tensor = self.output_norm(super().attend_or_decode(q, k, v, pattern, cache))
        return normed


class ScaledRMSNorm(LayoutModule):
    """y / sqrt(mean(y^2) + eps) of y = x * (1 + weight) over the last dimension, in fp32."""

    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.declare("weight", ParameterLayout((size,), zeros, partial_gradient=sequence_axes(ctx)))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_rms_norm(x, self.weight, self.eps)


class ResidualGate(LayoutModule):
    """alpha x + beta y in each channel; see above. gate [H], in fp32 whatever the precision of the model is."""

    gate: Tensor

    def __init__(self, config: MuseSparkConfig, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.temperature = config.residual_gate_temperature
        init = normal(config.init_method_std)
        layout = ParameterLayout((config.hidden_size,), init, partial_gradient=sequence_axes(ctx), dtype=torch.float32)
        self.declare("gate", layout)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """[B, S, H] each -> [B, S, H] in the dtype of x"""
        logits = self.gate.float() / self.temperature
        beta = logits.sigmoid()
        # sigmoid(-logits) is 1 - beta without cancellation.
        alpha = ((-logits).sigmoid() * (1.0 + beta)).clamp(min=SMALLEST_SHARE).sqrt()
        return (alpha * x + beta * branch).to(x.dtype)


class MuseSparkLayer(nn.Module):
    """Layer `number`: [batch, sequence, hidden] -> the same."""

    def __init__(self, config: MuseSparkConfig, context: ModelBuildContext, number: int) -> None:
        super().__init__()
        ctx, core = context.parallel, attention_core(config, context, window=config.window_of(number))
        norm = partial(ZeroCenteredRMSNorm, config.hidden_size, config.norm_epsilon, ctx)
        self.input_layernorm = norm()
        self.self_attention = MuseSparkAttention(config, core, ctx, number)
        self.post_self_attn_layernorm = ScaleFreeRMSNorm(config.post_norm_epsilon)
        self.attention_residual = ResidualGate(config, ctx)
        self.pre_mlp_layernorm = norm()
        self.mlp = context.feed_forward(config.feed_forward, config, number)
        self.post_mlp_layernorm = ScaledRMSNorm(config.hidden_size, config.post_norm_epsilon, ctx)
        self.mlp_residual = ResidualGate(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        attended = self.self_attention(self.input_layernorm(x), pattern, angles, cache)
        x = self.attention_residual(x, self.post_self_attn_layernorm(attended))
        fed = self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))
        gated: Tensor = self.mlp_residual(x, fed)
        return gated


def build_muse_spark(config: MuseSparkConfig, context: ModelBuildContext) -> MuseGlimmerModel:
    """See `ModelSpec.build`."""
    return MuseGlimmerModel(config, context, MuseSparkLayer)
