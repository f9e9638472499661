"""MiMo-V2-Flash: pre-norm layers of attention and MoE, most of them with a sliding window.

q, k [N, D], v [N, V] of fewer key-value heads; the first channels of q and k are rotated; v = 0.707 W_v x
layers with a window: twice the key-value heads, another rotary base, and a sink in each head's softmax
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import PagedScores, PositionState
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import attention_core
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.transformer import TransformerLayer
from mt_models.gpt_oss.model import CoreAttention
from mt_models.mimo_v2_flash.config import MiMoV2FlashConfig


class NarrowValueAttention(SelfAttention):
    """Self-attention whose value heads have another size than its query and key heads.

    config: with the key-value heads of the layer (`MiMoV2FlashConfig.of_layer`). Rows of linear_qkv are grouped as
    those of SelfAttention: of each group its query heads, then its key head, then its value head.
    sinks: the softmax of each head has a learned logit without a value.
    """

    def __init__(
        self, config: MiMoV2FlashConfig, core: AttentionCore, ctx: ParallelContext, window: int | None, *, sinks: bool
    ) -> None:
        bias = config.attention_bias
        super().__init__(config, core, ctx, window=window, qkv_bias=bias, output_bias=False)
        self.value_dim, self.value_scale = config.v_head_dim, config.attention_value_scale
        # Replace the matrices that SelfAttention has built for value heads of the size of key heads.
        heads, groups = config.num_attention_heads, config.query_groups
        self.rows = heads * self.head_dim + groups * (self.head_dim + self.value_dim)
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            self.rows,
            ctx,
            bias=bias,
            init=normal(config.init_method_std),
            padded=-(-self.rows // ctx.tp.size) * ctx.tp.size,
        )
        self.linear_proj = RowParallelLinear(
            heads * self.value_dim, config.hidden_size, ctx, bias=False, init=normal(config.output_init_std)
        )
        self.core_attention: CoreAttention | None = None
        if sinks:
            self.core_attention = CoreAttention(core, heads, config.init_method_std, ctx)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] -> q [B, S, N, D], k [B, S, G, D] and v [B, S, G, V], of this rank's groups"""
        rows = self.linear_qkv(x)
        if self.ranks_per_group > 1:
            rows = self._group_of_rank(rows)
        # [B, S, G, rows of a group]
        groups = rows.unflatten(-1, (-1, self.rows // self.query_groups))
        queries = self.heads_per_group * self.head_dim
        q, k, v = groups.split((queries, self.head_dim, self.value_dim), dim=-1)
        q = q.unflatten(-1, (self.heads_per_group, self.head_dim))
        if self.ranks_per_group > 1:
            q = q.chunk(self.ranks_per_group, 3)[self.tp.rank % self.ranks_per_group]
        return q.flatten(2, 3), k, v * self.value_scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        if self.core_attention is None:
            return super().attend(q, k, v, pattern)
        return self.core_attention(q, k, v, pattern, self.dropout.begin())

    def cached_state(self) -> PositionState:
        groups = max(self.query_groups // self.tp.size, 1)
        shapes = ((groups, self.head_dim), (groups, self.value_dim))
        return PositionState(shapes, self.linear_qkv.weight.dtype, self.window, is_paged=True)

    def paged_scores(self, pattern: AttentionPattern) -> PagedScores:
        scores = super().paged_scores(pattern)
        return scores if self.core_attention is None else replace(scores, sinks=self.core_attention.softmax_offset)


def mimo_layer(
    config: MiMoV2FlashConfig, context: ModelBuildContext, number: int, feed_forward: str
) -> TransformerLayer:
    """Layer `number` of the model, those of multi-token prediction counted behind the others, with a feed-forward of
    that name."""
    ctx, window, sized = context.parallel, config.window_of(number), config.of_layer(number)
    core = attention_core(sized, context, window=window, sinks=window is not None)
    attention = NarrowValueAttention(sized, core, ctx, window, sinks=window is not None)
    return TransformerLayer(sized, core, context.feed_forward(feed_forward, config, number), ctx, attention)


class MiMoV2FlashModel(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: MiMoV2FlashConfig, context: ModelBuildContext) -> None:
        super().__init__(
            config,
            context,
            lambda number: mimo_layer(config, context, number, config.feed_forward),
            lambda depth: mimo_layer(config, context, config.num_layers + depth, "dense"),
        )


def build_mimo_v2_flash(config: MiMoV2FlashConfig, context: ModelBuildContext) -> MiMoV2FlashModel:
    """See `ModelSpec.build`."""
    return MiMoV2FlashModel(config, context)
