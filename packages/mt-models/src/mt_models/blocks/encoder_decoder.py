"""What encoder-decoder models share: both stacks, their pipeline stages, generation.

Shapes: B batch, S encoder and T decoder positions, H hidden, V vocabulary (this rank's ids under tensor
parallelism). With sequence parallelism hidden states between the layers are sharded along S and T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore, AttentionPattern, Bias
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, Conditioning, KeepsState, layers_with_state
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput
from mt_core.nn.layout import normal
from mt_core.nn.model import Model
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_models.blocks.cross_attention import DecoderStack
from mt_models.blocks.embedding import TiedOutput
from mt_models.blocks.position_bias import RelativeBias
from mt_models.blocks.transformer import LayerConfigLike, PostNormStack, TransformerStack


class EncoderDecoderConfigLike(LayerConfigLike, Protocol):
    """What the parts below read from the configuration of a model. num_layers: of the encoder."""

    @property
    def vocab_size(self) -> int | None: ...
    @property
    def make_vocab_size_divisible_by(self) -> int: ...
    @property
    def attention_backend(self) -> str: ...
    @property
    def decoder_layers(self) -> int: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...
    @property
    def add_output_bias(self) -> bool: ...
    @property
    def output_scale(self) -> float:
        """Factor of what is compared with the token embeddings."""
        ...

    @property
    def max_position_embeddings(self) -> int | None: ...


class SharedEmbedding(nn.Module):
    """Token embeddings that both stacks begin with, and a tied LM head ends with."""

    def __init__(self, config: EncoderDecoderConfigLike, ctx: ParallelContext, init_std: float) -> None:
        super().__init__()
        assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            ctx,
            init=normal(init_std),
            divisible_by=config.make_vocab_size_divisible_by,
        )


class EncoderDecoderModel(Model):
    """encoder_tokens [B, S], decoder_tokens [B, T] -> logits [B, T, V]."""

    inputs: tuple[str, ...] = ("encoder_tokens", "decoder_tokens", "encoder_mask")
    # Set by subclasses. What this process holds nothing of is None: the state dict has no names for it.
    embedding: SharedEmbedding | None
    encoder: TransformerStack | PostNormStack
    decoder: DecoderStack
    output_layer: TiedOutput | VocabParallelOutput | None
    encoder_relative_pos_emb: RelativeBias | None
    decoder_relative_pos_emb: RelativeBias | None

    def __init__(self, config: EncoderDecoderConfigLike, ctx: ParallelContext) -> None:
        super().__init__()
        self.config, self.ctx = config, ctx

    def encoder_input(self, tokens: Tensor) -> Tensor:
        """[B, S] ids -> [B, S, H], what the first layer of the encoder takes."""
        raise NotImplementedError

    def decoder_input(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """[B, T] ids at positions [B or 1, T] (default: 0 ...) -> [B, T, H]"""
        raise NotImplementedError

    def encoder_output(self, x: Tensor) -> Tensor:
        """[B, S, H] behind the last layer or norm of the encoder -> the memory of the decoder."""
        return x

    def decoder_output(self, x: Tensor) -> Tensor:
        return x

    def input_modules(self, *, encoder: bool, decoder: bool) -> Iterator[nn.Module]:
        """Beside the token embeddings, what makes the input of the encoder, of the decoder."""
        return iter(())

    def forward(self, encoder_tokens: Tensor, decoder_tokens: Tensor, encoder_mask: Tensor | None = None) -> Tensor:
        """encoder_mask [B, S]: 1 for tokens, 0 for padding (default: all are tokens). Padding at the end of the
        decoder's sequences needs no mask: what stands before does not see it."""
        return self.decode(decoder_tokens, self.encode(encoder_tokens, encoder_mask), encoder_mask)

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | tuple[Tensor, Tensor] | None,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A range of layers, those of the encoder numbered before those of the decoder. See Pipelined.

        Stages of the encoder send its hidden states [B, S, H], stages of the decoder send its hidden states [B, T, H]
        and the encoder's output (the memory, [B, S, H]). The last stage outputs logits [B, T, V].
        """
        # The stage in the middle may have layers of both stacks: it ends the encoder and begins the decoder.
        encoder, decoder = parts_of_stage(stage, self.config)
        if encoder is not None:
            assert not isinstance(hidden, tuple)
            hidden = self.encode(encoder_tokens, encoder_mask, encoder, hidden)
        if decoder is None:
            assert hidden is not None
            return hidden
        # A tensor comes from the encoder (or was made above), a pair from a stage of the decoder.
        x, memory = (None, hidden) if not isinstance(hidden, tuple) else hidden
        assert memory is not None
        # The mask is a field of the micro-batch, which every stage gets: it is not sent with the memory.
        x = self.decoder_states(decoder_tokens, memory, encoder_mask, None, decoder, x)
        return self.logits(x) if stage.last else (x, memory)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        encoder, decoder = parts_of_stage(stage, self.config)
        # Both stacks begin with the same embedding, and a tied LM head ends with it: up to three stages have a copy.
        begins = [part is not None and part.first for part in (encoder, decoder)]
        ties = stage.last and isinstance(self.output_layer, TiedOutput)
        modules = [
            self.embedding if any(begins) or ties else None,
            self.encoder_relative_pos_emb if encoder is not None else None,
            self.decoder_relative_pos_emb if decoder is not None else None,
            self.output_layer if stage.last else None,
            *self.input_modules(encoder=begins[0], decoder=begins[1]),
        ]
        yield from (module for module in modules if module is not None)
        if encoder is not None:
            yield from self.encoder.stage_modules(encoder)
        if decoder is not None:
            yield from self.decoder.stage_modules(decoder)

    def encode(
        self,
        encoder_tokens: Tensor,
        encoder_mask: Tensor | None = None,
        stage: Stage | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """[B, S] -> [B, S, H]. stage: the encoder's layers to run, from x on; default: all of them."""
        stage = stage or whole(self.config.num_layers)
        length = encoder_tokens.shape[1]
        # [1, N, S, S], of this rank's heads, computed once for all layers: in T5 only the first layer owns a table.
        bias = None if self.encoder_relative_pos_emb is None else self.encoder_relative_pos_emb(length, length)
        pattern = AttentionPattern(causal=False, key_padding=seen(encoder_mask), bias=bias)
        if stage.first:
            x = self.encoder_input(encoder_tokens)
        x = self.encoder(x, pattern, stage=stage)
        return self.encoder_output(x) if stage.last else x

    def decode(self, decoder_tokens: Tensor, memory: Tensor, encoder_mask: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of decoder_tokens [B, T]. memory: of `encode`."""
        return self.logits(self.decoder_states(decoder_tokens, memory, encoder_mask))

    conditioned_by: ClassVar[tuple[str, ...]] = ("encoder_tokens",)

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        if "encoder_tokens" not in inputs:
            raise ConfigError("the model needs encoder_tokens [1, S], the text that its encoder reads")
        text, most = inputs["encoder_tokens"], self.max_sequence_length
        if text.ndim != 2 or len(text) != 1 or not text.numel():
            raise ConfigError(f"encoder_tokens has shape {list(text.shape)}; it has to be [1, S], S at least 1")
        if most is not None and text.shape[1] > most:
            raise ConfigError(
                f"the encoder's text has {text.shape[1]} tokens, and model.max_position_embeddings={most}; shorten it"
            )

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """encoder_tokens [1, S] -> the encoder's output"""
        return self.conditioned(self.encode_stage(whole(self.config.num_layers), None, inputs), inputs)

    def conditioned(self, memory: Tensor, inputs: Mapping[str, Tensor]) -> Conditioning:
        return {"memory": memory, "memory_length": torch.tensor(inputs["encoder_tokens"].shape[1])}

    def encode_stage(self, stage: Stage, hidden: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens = inputs["encoder_tokens"]
        # Sequence parallelism divides the text: it is filled up, and what the cache makes of the filler is cut off.
        filler = -tokens.shape[1] % self.ctx.tp.size if self.ctx.sequence_parallel else 0
        mask = None
        if filler:
            # The filler is not seen by the text, and "memory_length" excludes it from cross attention.
            mask = nn.functional.pad(torch.ones_like(tokens), (0, filler))
            tokens = nn.functional.pad(tokens, (0, filler))
        return self.encode(tokens, mask, stage, hidden)

    def stacks_of_stage(self, stage: Stage) -> tuple[Stage | None, Stage | None]:
        return parts_of_stage(stage, self.config)

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Tensor:
        x = self.decoder_states(cache.tokens, None, None, cache, stage, hidden)
        return self.logits(cache.positions_for_logits(x)) if stage.last else x

    def cached_layers(self) -> Iterator[KeepsState]:
        return layers_with_state(self.decoder)

    @property
    def decoded_layers(self) -> int:
        return self.config.decoder_layers

    def decoder_states(
        self,
        decoder_tokens: Tensor,
        memory: Tensor | None,
        encoder_mask: Tensor | None = None,
        cache: Cache | None = None,
        stage: Stage | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """[B, T, H] after the decoder's final norm. stage: its layers to run, from x on; default: all."""
        stage = stage or whole(self.config.decoder_layers)
        bias: Bias | None = self.decoder_relative_pos_emb
        # With a cache the module itself is the bias: the cache calls attention for each sequence, with its own lengths.
        if self.decoder_relative_pos_emb is not None and cache is None:
            bias = self.decoder_relative_pos_emb(decoder_tokens.shape[1], decoder_tokens.shape[1])
        pattern = AttentionPattern(bias=bias)
        memory_pattern = AttentionPattern(causal=False, key_padding=seen(encoder_mask))
        if stage.first:
            x = self.decoder_input(decoder_tokens, None if cache is None else cache.position_ids)
        assert x is not None
        x = self.decoder(x, pattern, memory, memory_pattern, cache, stage)
        return self.decoder_output(x) if stage.last else x

    def logits(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V]"""
        assert self.output_layer is not None
        scale = self.config.output_scale
        if isinstance(self.output_layer, TiedOutput):
            assert self.embedding is not None
            # With tied weights that start with a standard deviation of 1, logits would grow with sqrt(hidden_size).
            return self.output_layer(x * scale, self.embedding.word_embeddings)
        return self.output_layer(x if scale == 1.0 else x * scale)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence of encoder and decoder; None without learned positions."""
        return self.config.max_position_embeddings


@dataclass(frozen=True)
class StageParts:
    """A process's part of a model with pipeline stages. encoder, decoder: numbers of layers in their stacks."""

    embedding: bool
    encoder: list[int]
    decoder: list[int]
    encoder_end: bool
    """The final norm of the encoder."""
    encoder_begin: bool
    """What makes the input of the encoder's first layer, beside the embedding."""
    decoder_begin: bool

    @classmethod
    def of(cls, config: EncoderDecoderConfigLike, context: ModelBuildContext) -> StageParts:
        # None without pipeline parallelism: one stage with all layers of both stacks.
        stages = context.stages or (whole(config.num_layers + config.decoder_layers),)
        parts = [parts_of_stage(stage, config) for stage in stages]
        encoders = [encoder for encoder, _ in parts if encoder is not None]
        decoders = [decoder for _, decoder in parts if decoder is not None]
        ties = context.has_last and not config.untie_embeddings_and_output_weights
        return cls(
            embedding=ties or any(part.first for part in (*encoders, *decoders)),
            encoder=sorted(number for part in encoders for number in part.layers),
            decoder=sorted(number for part in decoders for number in part.layers),
            encoder_end=any(part.last for part in encoders),
            encoder_begin=any(part.first for part in encoders),
            decoder_begin=any(part.first for part in decoders),
        )


def parts_of_stage(stage: Stage, config: EncoderDecoderConfigLike) -> tuple[Stage | None, Stage | None]:
    """A stage of the whole model as stages of its two stacks, in their own numbering; None without a part of a stack.

    The stage with the encoder's last layer ends the encoder; the one with the decoder's first begins the decoder.
    """
    # Two stacks of 2 layers over 3 stages of layers 0, 1-2 and 3:
    #   layers 0    encoder 0, first             no decoder
    #   layers 1-2  encoder 1, last              decoder 0, first
    #   layers 3    no encoder                   decoder 1, last
    middle, end = config.num_layers, config.num_layers + config.decoder_layers
    layers, encoder, decoder = stage.layers, None, None
    if not layers:
        # A stage without layers: it has an embedding or a head only, or passes its input on.
        encoder = Stage(range(0), last=False) if stage.first else None
        decoder = Stage(range(end - middle, end - middle), first=False) if stage.last else None
        return encoder, decoder
    if layers.start < middle:
        encoder = Stage(range(layers.start, min(layers.stop, middle)), stage.first, last=layers.stop >= middle)
    if layers.stop > middle:
        numbers = range(max(layers.start, middle) - middle, layers.stop - middle)
        # layers.start == middle: the stage begins with the decoder and has no layer of the encoder.
        decoder = Stage(numbers, first=layers.start <= middle, last=stage.last)
    return encoder, decoder


def seen(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.bool()


def attention_core(
    config: EncoderDecoderConfigLike, context: ModelBuildContext, *, causal: bool, bias: bool
) -> AttentionCore:
    return context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        causal=causal,
        bias=bias,
    )


def build_output(config: EncoderDecoderConfigLike, ctx: ParallelContext) -> TiedOutput | VocabParallelOutput:
    assert config.vocab_size is not None
    multiple = config.make_vocab_size_divisible_by
    if config.untie_embeddings_and_output_weights:
        init = normal(config.init_method_std)
        return VocabParallelOutput(config.vocab_size, config.hidden_size, ctx, init=init, divisible_by=multiple)
    return TiedOutput(config.vocab_size, ctx, bias=config.add_output_bias, divisible_by=multiple)
