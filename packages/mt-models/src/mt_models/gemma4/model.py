"""Gemma 4: a norm before and after every block, local and global attention, embeddings of each layer.

    x = x + norm(attention(norm(x)))
    x = x + norm(GeGLU(norm(x)))             with experts: x + norm(norm(GeGLU(norm(x))) + norm(experts(norm(x))))
    x = x + norm(W_2 (gelu(W_1 x) * e))      e: this layer's embedding of the token
    x = x * layer_scalar

Token embeddings are multiplied by sqrt(hidden_size); norms multiply by their weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.activations import gelu_tanh
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, KeepsState
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, normal, ones, sequence_axes
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import Norm, build_norm
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import attention_core, without_placeholders
from mt_models.blocks.norm import ScaleFreeRMSNorm, WideRMSNorm
from mt_models.blocks.rotary import (
    FixedRotary,
    RotaryAngles,
    RotaryByWindow,
    inverse_frequencies,
    proportional_frequencies,
)
from mt_models.gemma.model import GemmaEmbedding, SoftcappedDecoder
from mt_models.gemma4.attention import Gemma4Attention, SharedKV
from mt_models.gemma4.config import Gemma4Config

# -- embeddings of each layer ------------------------------------------------------------------------


class PerLayerTable(LayoutModule):
    """Embeddings [vocab, layers * P] of each token in each layer. A tensor-parallel rank has a share of the channels of
    every layer, so that it looks up all tokens itself."""

    weight: Tensor

    def __init__(self, config: Gemma4Config, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        width = config.num_layers * config.hidden_size_per_layer_input
        split = Split(dim=1, axis="tp", sections=config.num_layers)
        init = normal(config.init_method_std)
        self.declare("weight", ParameterLayout((config.per_layer_vocab, width), init, (split,)))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class PerLayerInputs(nn.Module):
    """e = (sqrt(P) table[token] + norm(W x / sqrt(H))) / sqrt(2), x the token embeddings."""

    def __init__(self, config: Gemma4Config, ctx: ParallelContext) -> None:
        super().__init__()
        layers, size = config.num_layers, config.hidden_size_per_layer_input
        self.num_layers, self.size, self.hidden_size = layers, size, config.hidden_size
        self.embeddings = PerLayerTable(config, ctx)
        self.projection = ColumnParallelLinear(
            config.hidden_size, layers * size, ctx, bias=False, init=normal(config.init_method_std), sections=layers
        )
        self.norm = WideRMSNorm(size, 1, config.norm_epsilon, ctx)

    def forward(self, tokens: Tensor, x: Tensor, untrained: Tensor | None = None) -> Tensor:
        """tokens [B, S], x [B, S, H] -> [B, S, layers, P / tp], of whole sequences. untrained: bool [B, S], positions
        from which the table has no gradient."""
        by_layer = (self.num_layers, -1)
        # As GemmaEmbedding's: the factor is rounded to the dtype of the embeddings.
        table = self.embeddings(tokens)
        if untrained is not None:
            table = torch.where(untrained[..., None], table.detach(), table)
        table = table * torch.tensor(self.size**0.5, dtype=table.dtype)
        projected = (self.projection(x) * self.hidden_size**-0.5).unflatten(-1, by_layer)
        # WideRMSNorm: over the last two dimensions, of which tensor parallelism shards the first.
        normed = self.norm(projected[..., None]).squeeze(-1)
        return (normed + table.unflatten(-1, by_layer)) * 2.0**-0.5


class PerLayerBranch(nn.Module):
    """norm(W_2 (gelu(W_1 x) * e)): x [B, S, H], e [B, S, P / tp] -> [B, S, H]"""

    def __init__(self, config: Gemma4Config, ctx: ParallelContext) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = ColumnParallelLinear(hidden, size, ctx, bias=False, init=normal(config.init_method_std))
        self.projection = RowParallelLinear(size, hidden, ctx, bias=False, init=normal(config.output_init_std))
        self.norm = build_norm("RMSNorm", hidden, config.norm_epsilon, ctx)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.norm(self.projection(gelu_tanh(self.gate(x)) * embedding))


# -- experts -----------------------------------------------------------------------------------------


class RouterInput(LayoutModule):
    """What the router reads: x / rms(x) * scale / sqrt(H)."""

    scale: Tensor

    def __init__(self, config: Gemma4Config, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.norm, self.factor = ScaleFreeRMSNorm(config.norm_epsilon), config.hidden_size**-0.5
        self.declare("scale", ParameterLayout((config.hidden_size,), ones, partial_gradient=sequence_axes(ctx)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale * self.factor


class ExpertsBesideDense(nn.Module):
    """norm(dense) + norm(experts(norm(x))), dense the output of the dense feed-forward."""

    def __init__(self, config: Gemma4Config, context: ModelBuildContext, number: int) -> None:
        super().__init__()

        def norm() -> Norm:
            return build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, context.parallel)

        self.router_input = RouterInput(config, context.parallel)
        self.post_dense_layernorm, self.pre_layernorm, self.post_layernorm = norm(), norm(), norm()
        self.mlp = context.feed_forward("moe", config, number)

    def forward(self, x: Tensor, dense: Tensor) -> Tensor:
        routed = self.mlp(self.pre_layernorm(x), self.router_input(x))
        return self.post_dense_layernorm(dense) + self.post_layernorm(routed)


# -- layers ------------------------------------------------------------------------------------------


class Gemma4Layer(LayoutModule):
    """Layer `number` of the model: [batch, sequence, hidden] -> the same."""

    layer_scalar: Tensor

    def __init__(self, config: Gemma4Config, context: ModelBuildContext, number: int) -> None:
        ctx, window, sized = context.parallel, config.window_of(number), config.of_layer(number)
        super().__init__(ctx)
        self.number = number

        def norm() -> Norm:
            return build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, ctx)

        self.input_layernorm = norm()
        self.self_attention = Gemma4Attention(
            sized,
            layer_core(config, sized, context, window),
            ctx,
            window,
            keys_are_values=config.keys_are_values(number),
            shares_kv=config.shares_kv(number),
        )
        self.post_self_attn_layernorm = norm()
        self.pre_mlp_layernorm = norm()
        self.mlp = context.feed_forward("dense", sized, number)
        self.experts = None if config.moe is None else ExpertsBesideDense(config, context, number)
        self.post_mlp_layernorm = norm()
        self.per_layer_input = PerLayerBranch(config, ctx) if config.hidden_size_per_layer_input else None
        # Published with the weights, and not trained.
        self.declare("layer_scalar", ParameterLayout((1,), ones, trained=False))

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
        shared: SharedKV | None = None,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """embedding [B, S, P / tp]: of the tokens in this layer."""
        x, normed = self.input_layernorm.add(x)
        attended = self.post_self_attn_layernorm(self.self_attention(normed, pattern, angles, cache, shared))
        x, normed = self.pre_mlp_layernorm.add(x, attended)
        branch = self.mlp(normed)
        if self.experts is not None:
            branch = self.experts(x, branch)
        x = x + self.post_mlp_layernorm(branch)
        if self.per_layer_input is not None:
            x = x + self.per_layer_input(x, embedding)
        return x * self.layer_scalar


def layer_core(
    config: Gemma4Config, sized: Gemma4Config, context: ModelBuildContext, window: int | None
) -> AttentionCore:
    """sized: with the sizes of the layer."""
    if window is None or not config.has_image_patterns:
        return attention_core(sized, context, window=window)
    # Its masks are biases: see `ImagePattern`.
    return context.attention(
        sized.attention_backend,
        num_heads=sized.num_attention_heads,
        num_query_groups=sized.query_groups,
        head_dim=sized.head_dim,
        dropout=sized.attention_dropout,
        causal=False,
        bias=True,
    )


class Gemma4Model(SoftcappedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: Gemma4Config

    def __init__(self, config: Gemma4Config, context: ModelBuildContext) -> None:
        super().__init__(config, context, GemmaEmbedding, lambda number: Gemma4Layer(config, context, number))
        self.per_layer_inputs: PerLayerInputs | None = None
        if config.hidden_size_per_layer_input:
            self.per_layer_inputs = PerLayerInputs(config, context.parallel)
        self.rotary = build_gemma4_rotary(config)

    @property
    def is_divisible(self) -> bool:  # type: ignore[override]
        """Whether layers read the hidden states of the layer before them alone."""
        return self.config.is_divisible

    def through_layers(
        self,
        hidden: Tensor,
        tokens: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        stage: Stage,
    ) -> Tensor:
        embeddings = self.embeddings_of_layers(without_placeholders(tokens, self.config), hidden)
        shared = SharedKV()

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            embedding = None if embeddings is None else embeddings[:, :, number]
            return layer(x, pattern, angles, cache, shared, embedding)

        return self.decoder.through(hidden, call, stage)

    def embeddings_of_layers(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """[B, S, layers, P / tp] of tokens [B, S] whose embeddings are `hidden`, where layers have embeddings."""
        return None if self.per_layer_inputs is None else self.per_layer_inputs(tokens, hidden)

    def cached_layers(self) -> Iterator[KeepsState]:
        """The layers with keys and values of their own."""
        for layer in self.decoder.layers:
            assert isinstance(layer, Gemma4Layer)
            if not layer.self_attention.shares_kv:
                yield layer.self_attention

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield from super().stage_modules(stage)
        if stage.first and self.per_layer_inputs is not None:
            yield self.per_layer_inputs


def build_gemma4_rotary(config: Gemma4Config) -> RotaryByWindow:
    """Proportional frequencies in global layers, those of whole heads in local ones."""
    factor = config.rope_scaling_factor or 1.0
    whole = proportional_frequencies(config.global_kv_channels, config.rotary_base, config.rotary_percent, factor)
    local = inverse_frequencies(config.head_dim, config.rotary_base_local)
    return RotaryByWindow(FixedRotary(whole), FixedRotary(local))


def build_gemma4(config: Gemma4Config, context: ModelBuildContext) -> Gemma4Model:
    """See `ModelSpec.build`."""
    return Gemma4Model(config, context)
