"""Muse Glimmer's decoder: norms around every block, gated attention, normalized token embeddings.

    x = x + norm(attention(norm(x)))
    x = x + norm(SwiGLU(norm(x)))

Norms of layers multiply by 1 + weight, that behind the last by weight. Those of queries, keys and token embeddings have
no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore
from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding, attention_core
from mt_models.blocks.gated_attention import GatedSelfAttention
from mt_models.blocks.norm import ScaleFreeRMSNorm, ZeroCenteredRMSNorm
from mt_models.blocks.rotary import build_rotary
from mt_models.blocks.transformer import block_norm
from mt_models.gemma.model import GemmaLayer, SoftcappedDecoder
from mt_models.muse_glimmer.config import MuseGlimmerConfig


class NormalizedEmbedding(TokenEmbedding):
    """Token embeddings divided by their root mean square. A tied LM head has them as they are stored.

    Tokens in the place of other media are embedded as token 0.
    """

    def __init__(self, config: MuseGlimmerConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.norm = ScaleFreeRMSNorm(config.norm_epsilon)
        self.of_other_media = config.tokens_of_other_media

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        for number in self.of_other_media:
            tokens = tokens.masked_fill(tokens == number, 0)
        normed: Tensor = self.norm(super().forward(tokens, position_ids))
        return normed


class MuseGlimmerAttention(GatedSelfAttention):
    """Gated attention of layer `number`, whose queries and keys are divided by their root mean squares."""

    def __init__(self, config: MuseGlimmerConfig, core: AttentionCore, ctx: ParallelContext, number: int) -> None:
        super().__init__(config, core, ctx)
        self.window, self.rotates = config.window_of(number), config.rotates(number)
        self.query_scale = config.qk_scale_factor
        self.q_layernorm = self.k_layernorm = ScaleFreeRMSNorm(config.norm_epsilon)


class MuseGlimmerLayer(GemmaLayer):
    """Layer `number`: [batch, sequence, hidden] -> the same."""

    def __init__(self, config: MuseGlimmerConfig, context: ModelBuildContext, number: int) -> None:
        nn.Module.__init__(self)
        ctx, core = context.parallel, attention_core(config, context, window=config.window_of(number))
        norm = partial(ZeroCenteredRMSNorm, config.hidden_size, ctx=ctx)
        self.input_layernorm = norm(eps=config.norm_epsilon)
        self.self_attention = MuseGlimmerAttention(config, core, ctx, number)
        self.post_self_attn_layernorm = norm(eps=config.post_norm_epsilon)
        self.pre_mlp_layernorm = norm(eps=config.norm_epsilon)
        self.mlp = context.feed_forward(config.feed_forward, config, number)
        self.post_mlp_layernorm = norm(eps=config.post_norm_epsilon)


class MuseGlimmerModel(SoftcappedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. layer: the kind of its layers."""

    config: MuseGlimmerConfig

    def __init__(
        self,
        config: MuseGlimmerConfig,
        context: ModelBuildContext,
        layer: Callable[..., nn.Module] = MuseGlimmerLayer,
    ) -> None:
        super().__init__(
            config,
            context,
            NormalizedEmbedding,
            lambda number: layer(config, context, number),
            lambda: block_norm(config, context.parallel),
        )
        self.rotary = build_rotary(config)

    def logits(self, x: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(CausalDecoder.logits(self, x) * (self.config.output_multiplier / cap))


def build_muse_glimmer(config: MuseGlimmerConfig, context: ModelBuildContext) -> MuseGlimmerModel:
    """See `ModelSpec.build`."""
    return MuseGlimmerModel(config, context)
