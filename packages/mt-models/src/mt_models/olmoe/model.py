"""OLMoE: the layers of Llama with MoE, and norms over all query heads and over all key heads."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.attention import AttentionCore
from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import RotaryDecoder, attention_core
from mt_models.blocks.norm import WideRMSNorm
from mt_models.blocks.transformer import TransformerLayer
from mt_models.olmoe.config import OlmoeConfig


class OlmoeAttention(SelfAttention):
    """q_layernorm and k_layernorm normalize all heads of a position together; clip_qkv bounds the result."""

    def __init__(self, config: OlmoeConfig, core: AttentionCore, ctx: ParallelContext) -> None:
        super().__init__(config, core, ctx)
        # config.qk_layernorm is false, so that SelfAttention has built no norms of heads.
        size, epsilon = config.head_dim, config.norm_epsilon
        self.q_layernorm = WideRMSNorm(config.num_attention_heads, size, epsilon, ctx)
        self.k_layernorm = WideRMSNorm(config.query_groups, size, epsilon, ctx)
        self.clip = config.clip_qkv

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q, k, self._clipped(v)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().normalize(q, k)
        return self._clipped(q), self._clipped(k)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)


class OlmoeModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: OlmoeConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: olmoe_layer(config, context, number))


def olmoe_layer(config: OlmoeConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    return TransformerLayer(config, core, feed_forward, ctx, OlmoeAttention(config, core, ctx))


def build_olmoe(config: OlmoeConfig, context: ModelBuildContext) -> OlmoeModel:
    return OlmoeModel(config, context)
