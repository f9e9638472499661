"""A causal language model around a stack of layers: tokens -> embedding -> layers -> logits; and the Llama-like one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput, project_to_vocab
from mt_core.nn.layout import LayoutModule, normal
from mt_core.nn.loss import Unprojected
from mt_core.nn.model import Model
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.config import DecoderConfig
from mt_models.blocks.placeholder_config import PlaceholderKeys
from mt_models.blocks.rotary import RotaryAngles, build_rotary
from mt_models.blocks.transformer import BranchNormLayer, LayerConfigLike, TransformerLayer, TransformerStack


class EmbeddingConfigLike(Protocol):
    """What the token embeddings read from the configuration of their model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def make_vocab_size_divisible_by(self) -> int: ...


class DecoderConfigLike(LayerConfigLike, EmbeddingConfigLike, Protocol):
    """What a decoder reads from its configuration, beside what its layers read."""

    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...


class TokenEmbedding(LayoutModule):
    """Token embeddings. Tokens in the place of other media are embedded as another token (`PlaceholderKeys`)."""

    def __init__(self, config: EmbeddingConfigLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
        self.placeholders = config if isinstance(config, PlaceholderKeys) else PlaceholderKeys()
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            ctx,
            init=normal(config.init_method_std),
            divisible_by=config.make_vocab_size_divisible_by,
        )

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S] ids and positions -> [B, S, H]"""
        return self.word_embeddings(without_placeholders(tokens, self.placeholders))


def without_placeholders(tokens: Tensor, keys: PlaceholderKeys) -> Tensor:
    """tokens [B, S] with the token that stands for placeholders in their place."""
    for placeholder in keys.placeholder_token_ids:
        tokens = tokens.masked_fill(tokens == placeholder, keys.placeholder_embedding_id)
    return tokens


class CausalDecoder(Model):
    """tokens [B, S] -> logits [B, S, vocab]: over the true vocabulary, sharded over tensor-parallel ranks.

    A family gives its embedding and functions that build layer number i and the final norm; `pattern` and `angles`
    return the inputs of attention. With pipeline parallelism only the layers of this stage are built.
    """

    continues_text: ClassVar[bool] = True

    def __init__(
        self,
        config: DecoderConfigLike,
        context: ModelBuildContext,
        embedding: Callable[[Any, ParallelContext], TokenEmbedding],
        layer: Callable[[int], nn.Module],
        final_layernorm: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        ctx = context.parallel
        self.config = config
        tied = not config.untie_embeddings_and_output_weights
        self.embedding: TokenEmbedding | None = None
        if context.has_first:
            self.embedding = embedding(config, ctx)
        elif context.has_last and tied:
            # The last stage's copy of the token embeddings, which are its LM head. The gradients of the two copies are
            # summed over the first and the last stage (TiedWeights).
            self.embedding = TokenEmbedding(config, ctx)
        self.decoder = TransformerStack(
            {number: layer(number) for number in context.layers(config.num_layers)},
            config,
            ctx,
            context.recompute,
            final_layernorm,
            has_last=context.has_last,
        )
        self.output_layer: VocabParallelOutput | None = None
        if context.has_last and not tied:
            assert config.vocab_size is not None
            self.output_layer = VocabParallelOutput(
                config.vocab_size,
                config.hidden_size,
                ctx,
                init=normal(config.init_method_std),
                divisible_by=config.make_vocab_size_divisible_by,
            )

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        *,
        project: bool = True,
    ) -> Any:
        """position_ids [B, S]: default 0 .... segment_ids [B, S]: see AttentionPattern.

        project: False returns the input of the LM head (`Unprojected`), for a loss that does not materialize logits.
        """
        # One code path: the whole model is a stage that is first and last.
        stage = whole(self.config.num_layers)
        return self.run_stage(stage, None, tokens, position_ids, segment_ids, project=project)

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        *,
        project: bool = True,
    ) -> Any:
        """hidden [B, S, H] of the previous stage -> the next stage's input, or the logits. See Pipelined."""
        if position_ids is None:
            # [1, S], which broadcasts over the batch
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if stage.first:
            assert self.embedding is not None
            hidden = self.embedding(tokens, position_ids)
        assert hidden is not None
        # One object of each for all layers, so that a mask and cos and sin are computed once in a forward pass.
        pattern = self.pattern(segment_ids, tokens.device)
        angles = self.angles(position_ids, None if cache is None else cache.capacities)
        x = self.through_layers(hidden, tokens, pattern, angles, cache, stage)
        if not stage.last:
            return x
        if cache is not None:
            # Before the LM head: most positions of a prompt need no logits.
            x = cache.positions_for_logits(x)
        return self.logits(x) if project else self.unprojected(x)

    def through_layers(
        self,
        hidden: Tensor,
        tokens: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        stage: Stage,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H] through the layers of the stage. tokens [B, S]: for layers that read them."""
        return self.decoder(hidden, pattern, angles, cache, stage)

    def embed(self, tokens: Tensor, padding_mask: Tensor, input_type: str) -> Tensor:
        """[B, S], padded on the right -> [B, H] of length 1: the input of the LM head at each text's last token."""
        # Causal: what is behind the last token changes nothing.
        hidden = self(tokens, project=False).hidden
        last = padding_mask.sum(dim=1) - 1
        return nn.functional.normalize(hidden[torch.arange(len(last), device=last.device), last].float(), dim=-1)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        if (stage.first or (stage.last and self.output_layer is None)) and self.embedding is not None:
            yield self.embedding
        yield from self.decoder.stage_modules(stage)
        if stage.last and self.output_layer is not None:
            yield self.output_layer

    def pattern(self, segment_ids: Tensor | None, device: torch.device) -> AttentionPattern:
        """The attention mask: which keys a query sees."""
        return AttentionPattern(segment_ids=segment_ids)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        """Rotary angles of positions [B or 1, S]. capacity [1, S]: the lengths that cached
        sequences may grow to."""
        return None

    def frequencies_key(self, capacity: int) -> bytes:
        """Key of the rotary frequencies that a cached sequence has which may grow to `capacity` positions: with other
        frequencies equal tokens have other keys and values."""
        return b""

    def logits(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, vocab]"""
        rows = self.unprojected(x)
        return project_to_vocab(rows.hidden, rows.weight, rows.own, rows.ctx)

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits; None if they are a plain matrix product."""
        # A family that overrides `logits` (a softcap, a factor) would be trained without it by a loss that
        # computes the product itself. Such a family gives its own reason here.
        is_product = type(self).logits is CausalDecoder.logits
        return None if is_product else f"{type(self).__name__} makes more of its logits than a product"

    def unprojected(self, x: Tensor) -> Unprojected:
        """The input of the LM head for x [B, S, H], with its weight."""
        if self.output_layer is not None:
            matrix: VocabParallelEmbedding | VocabParallelOutput = self.output_layer
        else:
            assert self.embedding is not None
            # range: the ids of this rank without padding rows, so that no logits are those of padding.
            matrix = self.embedding.word_embeddings
        return Unprojected(x, matrix.weight, matrix.range, matrix.ctx)

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Any:
        return self.run_stage(stage, hidden, cache.tokens, cache.position_ids, cache=cache)

    @property
    def decoded_layers(self) -> int:
        return self.config.num_layers


# -- Llama-like: RMSNorm, a gated feed-forward, rotary positions -------------------------------------


class RotaryDecoder(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab].

    layer: builds layer number i; default: `rotary_layer`, which is all that Llama, Mistral, Mixtral and Qwen need.
    final_layernorm: makes the norm behind the last layer; default: the configured one.
    """

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        context: ModelBuildContext,
        layer: Callable[[int], nn.Module] | None = None,
        final_layernorm: Callable[[], nn.Module] | None = None,
    ) -> None:
        build_layer = layer or (lambda number: rotary_layer(config, context, number))
        super().__init__(config, context, TokenEmbedding, build_layer, final_layernorm)
        self.rotary = build_rotary(config)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        return self.rotary.angles(position_ids, capacity)

    def frequencies_key(self, capacity: int) -> bytes:
        return self.rotary.key(capacity)

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length


def attention_core(
    config: DecoderConfig,
    context: ModelBuildContext,
    *,
    window: int | None = None,
    logit_softcap: float | None = None,
    sinks: bool = False,
) -> AttentionCore:
    """The core of the backend that the configuration names."""
    return context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        window=window,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )


# -- freezing ----------------------------------------------------------------------------------------


def freeze(module: nn.Module) -> None:
    """Disable gradients of the module's parameters; they are saved and resumed like all others."""
    for part in module.modules():
        if isinstance(part, LayoutModule):
            # The layouts state it too: checkpoints and the run's summary read it there.
            part.layouts = {name: replace(layout, trained=False) for name, layout in part.layouts.items()}
    module.requires_grad_(False)


def rotary_layer(config: DecoderConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x)), or the norms behind; biases, norms of heads, the window,
    positions and the feed-forward (dense or MoE) are those of the configuration."""
    ctx, window = context.parallel, config.window_of(number)
    core = attention_core(config, context, window=window)
    attention = rotary_attention(config, core, ctx, number)
    layer = BranchNormLayer if config.norms_of_branches else TransformerLayer
    return layer(config, core, context.feed_forward(config.feed_forward, config, number), ctx, attention)


def rotary_attention(config: DecoderConfig, core: AttentionCore, ctx: ParallelContext, number: int) -> SelfAttention:
    """The attention of layer `number`."""
    return SelfAttention(
        config,
        core,
        ctx,
        window=config.window_of(number),
        qkv_bias=config.add_qkv_bias,
        output_bias=config.add_attention_output_bias,
        rotates=config.rotates(number),
        scales_queries=config.scales_queries(number),
        norms_over_heads=config.qk_layernorm_over_heads,
        norms_after_rotary=config.qk_layernorm_after_rotary,
    )


def build_rotary_decoder(config: DecoderConfig, context: ModelBuildContext) -> RotaryDecoder:
    """See `ModelSpec.build`."""
    return RotaryDecoder(config, context)
