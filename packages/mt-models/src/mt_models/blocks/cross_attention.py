"""Cross attention: queries of the decoder, keys and values of the encoder's output.

Shapes: B batch, S decoder positions, T encoder positions, H hidden, N heads, D head size. Tensor parallelism gives
each rank whole heads; with sequence parallelism S and T are sharded between the layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache, MemoryState
from mt_core.nn.dropout import AttentionDropout, Dropout
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.recompute import Recompute
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.attention import AttentionConfigLike, SelfAttention
from mt_models.blocks.transformer import LayerConfigLike, LayerStack, PostNormLayer, TransformerLayer, block_norm


class CrossAttention(nn.Module):
    """linear_proj(core(linear_q(x), k, v)) with k, v from linear_kv(memory): [B, S, H], [B, T, H] -> [B, S, H].

    Rows of linear_kv are grouped by head, a head's keys before its values. query_scale multiplies the queries.
    """

    def __init__(
        self, config: AttentionConfigLike, core: AttentionCore, ctx: ParallelContext, query_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.core, self.query_scale = core, query_scale
        self.head_dim = config.head_dim
        self.dropout = AttentionDropout(config.attention_dropout, ctx)
        hidden, width, bias = config.hidden_size, config.num_attention_heads * config.head_dim, config.add_bias_linear
        init = normal(config.init_method_std)
        self.linear_q = ColumnParallelLinear(hidden, width, ctx, bias=bias, init=init)
        self.linear_kv = ColumnParallelLinear(hidden, 2 * width, ctx, bias=bias, init=init)
        self.linear_proj = RowParallelLinear(width, hidden, ctx, bias=bias, init=normal(config.output_init_std))

    def forward(self, x: Tensor, memory: Tensor | None, pattern: AttentionPattern, cache: Cache | None) -> Tensor:
        q = self.linear_q(x).unflatten(-1, (-1, self.head_dim)) * self.query_scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.core(q, k, v, pattern, self.dropout.begin())

        if cache is not None:
            # The encoder's output does not change while the decoder generates:
            # keys and values are computed once a sequence.
            out = cache.attend_memory(self, attend, (q,), self.keys_and_values)
        else:
            assert memory is not None
            out = attend(q, *self.keys_and_values(memory))
        return self.linear_proj(out.flatten(2))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> [B, T, N, D] each, of this rank's heads"""
        # [B, T, N 2 D] -> [B, T, N, 2, D]. By head, so that a shard of rows has both of each of its heads.
        k, v = self.linear_kv(memory).unflatten(-1, (-1, 2, self.head_dim)).unbind(3)
        return k, v

    def cached_state(self) -> MemoryState:
        # The heads of this rank, from the shard of the weight.
        shape = (self.linear_q.weight.shape[0] // self.head_dim, self.head_dim)
        return MemoryState((shape, shape), self.linear_kv.weight.dtype)


class ScaledQueryAttention(SelfAttention):
    """Self-attention with scaled queries: a scale of sqrt(D) cancels the core's 1 / sqrt(D)."""

    def __init__(
        self, config: AttentionConfigLike, core: AttentionCore, ctx: ParallelContext, query_scale: float = 1.0
    ) -> None:
        super().__init__(config, core, ctx)
        self.query_scale = query_scale


class CrossAttentionLayer(TransformerLayer):
    """x + attention(norm(x)), x + cross_attention(norm(x), memory), x + feed_forward(norm(x)): [B, S, H].

    attention: replaces self-attention with scaled queries.
    """

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        cross_core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        query_scale: float = 1.0,
        attention: nn.Module | None = None,
    ) -> None:
        self_attention = attention or ScaledQueryAttention(config, core, ctx, query_scale)
        super().__init__(config, core, feed_forward, ctx, self_attention)
        self.pre_cross_attn_layernorm = block_norm(config, ctx)
        self.cross_attention = CrossAttention(config, cross_core, ctx, query_scale)
        self.cross_attention_dropout = Dropout(config.hidden_dropout, ctx)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        pattern: AttentionPattern,
        memory: Tensor | None,
        memory_pattern: AttentionPattern,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        attended = self.self_attention(normed, pattern, None, cache)
        x, normed = self.residual_and_norm(x, attended, self.attention_dropout, self.pre_cross_attn_layernorm)
        crossed = self.cross_attention(normed, memory, memory_pattern, cache)
        x, normed = self.residual_and_norm(x, crossed, self.cross_attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.mlp(normed), self.mlp_dropout)


class PostNormCrossAttentionLayer(PostNormLayer):
    """norm(x + attention(x)), norm(x + cross_attention(x, memory)), norm(x + feed_forward(x)): [B, S, H]."""

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        cross_core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
    ) -> None:
        super().__init__(config, core, feed_forward, ctx)
        self.cross_attention = CrossAttention(config, cross_core, ctx)
        self.cross_attention_dropout = Dropout(config.hidden_dropout, ctx)
        self.post_cross_attn_layernorm = block_norm(config, ctx)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        pattern: AttentionPattern,
        memory: Tensor | None,
        memory_pattern: AttentionPattern,
        cache: Cache | None = None,
    ) -> Tensor:
        x = self.post_attention_layernorm(x + self.attention_dropout(self.self_attention(x, pattern, None, cache)))
        crossed = self.cross_attention(x, memory, memory_pattern, cache)
        x = self.post_cross_attn_layernorm(x + self.cross_attention_dropout(crossed))
        return self.post_mlp_layernorm(x + self.mlp_dropout(self.mlp(x)))


class DecoderStack(LayerStack):
    """Decoder layers with cross attention."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        config: LayerConfigLike,
        ctx: ParallelContext,
        recompute: Recompute,
        *,
        has_last: bool = True,
    ) -> None:
        super().__init__(layers, recompute, block_norm(config, ctx) if has_last else None)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        memory: Tensor | None,
        memory_pattern: AttentionPattern,
        cache: Cache | None = None,
        stage: Stage | None = None,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H] through the layers of the stage; default: all of them."""

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, pattern, memory, memory_pattern, cache)

        return self.through(x, call, stage)
