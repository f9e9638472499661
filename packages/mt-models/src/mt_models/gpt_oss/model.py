"""GPT-OSS: pre-norm layers of attention with sinks, every second one with a sliding window, and MoE."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import PagedScores
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, normal
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import AttentionConfigLike, SelfAttention
from mt_models.blocks.decoder import RotaryDecoder, attention_core
from mt_models.blocks.transformer import TransformerLayer
from mt_models.gpt_oss.config import GptOssConfig

# -- attention with sinks: a learned logit per head that takes part in the softmax without a key -----


class CoreAttention(LayoutModule):
    """The core with its sinks softmax_offset [N], sharded over tensor-parallel ranks as the heads are.

    The name is Megatron-Core's (softmax_type "learnable").
    """

    softmax_offset: Tensor

    def __init__(self, core: AttentionCore, num_heads: int, std: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.core = core
        self.declare("softmax_offset", ParameterLayout((num_heads,), normal(std), (Split(dim=0, axis="tp"),)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
        """q [B, S, N, D], k and v [B, T, G, D] -> [B, S, N, D], of this rank's heads"""
        # softmax over the scores and the sink: exp(s_j) / (exp(sink) + sum_i exp(s_i)). A head can attend to nothing.
        return self.core(q, k, v, pattern, dropout, self.softmax_offset)


class SinkAttention(SelfAttention):
    """Self-attention whose heads have sinks."""

    def __init__(
        self, config: AttentionConfigLike, core: AttentionCore, ctx: ParallelContext, *, window: int | None
    ) -> None:
        super().__init__(config, core, ctx, window=window)
        # A module around the core, since the parameter's name has to be self_attention.core_attention.softmax_offset.
        self.core_attention = CoreAttention(core, config.num_attention_heads, config.init_method_std, ctx)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        return self.core_attention(q, k, v, pattern, self.dropout.begin())

    def paged_scores(self, pattern: AttentionPattern) -> PagedScores:
        return replace(super().paged_scores(pattern), sinks=self.core_attention.softmax_offset)


class GptOssModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: GptOssConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: gpt_oss_layer(config, context, number))


def gpt_oss_layer(config: GptOssConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    ctx, window = context.parallel, config.window_of(number)
    core = attention_core(config, context, window=window, sinks=True)
    attention = SinkAttention(config, core, ctx, window=window)
    return TransformerLayer(config, core, context.feed_forward(config.feed_forward, config, number), ctx, attention)


def build_gpt_oss(config: GptOssConfig, context: ModelBuildContext) -> GptOssModel:
    return GptOssModel(config, context)
