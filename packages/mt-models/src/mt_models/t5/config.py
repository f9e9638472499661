"""Configuration of the T5 family: keys, the rules that tie them together, published sizes and FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed
from mt_core.config.fields import PositiveInt, Probability, used_when
from mt_core.config.schema import Activation, Config, ModelConfig
from mt_core.errors import ConfigError
from mt_models.blocks.config import check_tensor_parallel, refuse_divided_sequences
from mt_models.flops import (
    Convention,
    Flops,
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    output_flops,
    projection_flops,
)


class T5Config(ModelConfig):
    """An encoder and a decoder."""

    num_layers: PositiveInt
    """Layers of the encoder."""
    decoder_num_layers: PositiveInt | None = None
    """Layers of the decoder. Default: num_layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Attention heads."""
    kv_channels: PositiveInt | None = None
    """Size of a head. Default: hidden_size / num_attention_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 4 hidden_size."""
    position_embedding_type: Literal["relative", "learned_absolute"] = "relative"
    """relative: a bias of the scores by distance, as in T5. learned_absolute: a table of positions that encoder
    and decoder share, as in Megatron's T5."""
    relative_attention_num_buckets: Annotated[int, Field(ge=4)] = used_when(32, position_embedding_type="relative")
    """Ranges of distances that have a bias of their own; in the encoder half of them for each direction."""
    relative_attention_bias_per_layer: bool = used_when(False, position_embedding_type="relative")
    """Each layer has biases of its own, as in UMT5; otherwise all layers of a stack share one table."""
    relative_attention_max_distance: PositiveInt = used_when(128, position_embedding_type="relative")
    """Distances from here on share one bias."""
    max_position_embeddings: PositiveInt | None = used_when(None, position_embedding_type="learned_absolute")
    """Rows of the table of learned positions, the longest sequence of encoder and decoder."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of normalization."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the variance."""
    activation: Activation = "relu"
    """Activation of the feed-forward: relu in T5, geglu_tanh in T5 1.1, gelu in Megatron's."""
    add_bias_linear: bool = False
    """Biases in the linear layers."""
    scale_attention_scores: bool = False
    """Divide scores by the square root of the head's size. T5 does not, Megatron's does."""
    untie_embeddings_and_output_weights: bool = False
    """The output projection has a matrix of its own, as in T5 1.1."""
    scale_output: bool = used_when(True, untie_embeddings_and_output_weights=False)
    """Multiply what is compared with the token embeddings by hidden_size^-0.5, as T5 does. Token embeddings then start
    with a standard deviation of 1."""
    scale_untied_output: bool = used_when(False, untie_embeddings_and_output_weights=True)
    """The same in front of an output projection with a matrix of its own, as transformers 5 computes UMT5; T5 1.1 and
    mT5 do not."""
    add_output_bias: bool = used_when(False, untie_embeddings_and_output_weights=False)
    """A bias for each id on the logits, as in Megatron's T5."""
    hidden_dropout: Probability = 0.1
    """Dropout after the embedding, the attention, the feed-forward, and the last norm of encoder and decoder."""
    attention_dropout: Probability = 0.1
    """Dropout on the attention weights."""
    init_method_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""

    @property
    def decoder_layers(self) -> int:
        return self.decoder_num_layers or self.num_layers

    @property
    def stacked_layers(self) -> int:
        """Layers that pipeline stages divide: the encoder's, then the decoder's."""
        return self.num_layers + self.decoder_layers

    @property
    def query_groups(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before the core divides scores by sqrt(head_dim)."""
        # Every core divides by sqrt(head_dim). T5 was trained without the
        # division, with smaller initial weights instead.
        return 1.0 if self.scale_attention_scores else math.sqrt(self.head_dim)

    @property
    def output_scale(self) -> float:
        untied = self.untie_embeddings_and_output_weights
        scaled = self.scale_untied_output if untied else self.scale_output
        return self.hidden_size**-0.5 if scaled else 1.0

    @property
    def embedding_init_std(self) -> float:
        compared = self.scale_output and not self.untie_embeddings_and_output_weights
        return 1.0 if compared else self.init_method_std

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)

    # Fixed values for keys of the shared blocks that T5 does not expose.

    @property
    def add_qkv_bias(self) -> bool:
        return self.add_bias_linear

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False


def check_t5(config: Config) -> None:
    """Raise ConfigError for a T5 that cannot be built, or cannot read its samples."""
    model = config.model
    assert isinstance(model, T5Config)
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by model.num_attention_heads="
            f"{model.num_attention_heads}; the number of heads can be {listed(divisors(model.hidden_size))}, or set "
            "model.kv_channels"
        )
    check_tensor_parallel(config, query_groups=model.num_attention_heads, ffn_size=model.ffn_size)
    refuse_divided_sequences(config)
    _check_positions(model, config)


def _check_positions(model: T5Config, config: Config) -> None:
    if model.position_embedding_type == "relative":
        _check_buckets(model)
        return
    lengths = {"data.seq_length": config.data.seq_length}
    if (decoder := getattr(config.data, "decoder_seq_length", None)) is not None:
        lengths["data.decoder_seq_length"] = decoder
    if model.max_position_embeddings is None:
        raise ConfigError(
            "model.max_position_embeddings is not set; learned positions need it, at least "
            f"{max(lengths.values())} for {' and '.join(f'{key}={value}' for key, value in lengths.items())}"
        )
    for key, value in lengths.items():
        if value > model.max_position_embeddings:
            raise ConfigError(
                f"{key}={value} is longer than model.max_position_embeddings={model.max_position_embeddings}; use at "
                f"most {model.max_position_embeddings}, or more positions"
            )


def _check_buckets(model: T5Config) -> None:
    buckets = model.relative_attention_num_buckets
    if buckets % 4:
        near = f"{buckets // 4 * 4} or {buckets // 4 * 4 + 4}"
        raise ConfigError(
            f"model.relative_attention_num_buckets={buckets} is no multiple of 4: each of two directions has as many "
            f"single distances as ranges; the nearest are {near}"
        )
    if model.relative_attention_max_distance <= buckets // 2:
        raise ConfigError(
            f"model.relative_attention_max_distance={model.relative_attention_max_distance} must be above "
            f"{buckets // 2}, half of model.relative_attention_num_buckets={buckets}: nearer distances have biases of "
            "their own"
        )


# -- published sizes: T5, T5 1.1, mT5, UMT5, and Megatron's T5 ----------------------------------------


def _t5(layers: int, hidden: int, ffn: int, heads: int, head: int = 64, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "kv_channels": head,
            "vocab_size": 32128,
            **keys,
        },
        "data": {"seq_length": 512},
    }


def _t5_1_1(layers: int, hidden: int, ffn: int, heads: int, **keys: Any) -> dict[str, Any]:
    return _t5(layers, hidden, ffn, heads, activation="geglu_tanh", untie_embeddings_and_output_weights=True, **keys)


MULTILINGUAL = {
    "small": (8, 512, 1024, 6),
    "base": (12, 768, 2048, 12),
    "large": (24, 1024, 2816, 16),
    "xl": (24, 2048, 5120, 32),
    "xxl": (24, 4096, 10240, 64),
}
"""mT5 and UMT5 (which has no large one): T5 1.1 with vocabularies of all languages."""


MEGATRON_T5: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 512,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "activation": "gelu",
    "add_bias_linear": True,
    "scale_attention_scores": True,
    "scale_output": False,
    "add_output_bias": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "t5-small": _t5(6, 512, 2048, 8),
    "t5-base": _t5(12, 768, 3072, 12),
    "t5-large": _t5(24, 1024, 4096, 16),
    "t5-3b": _t5(24, 1024, 16384, 32, 128),
    "t5-11b": _t5(24, 1024, 65536, 128, 128),
    "t5-v1.1-small": _t5_1_1(8, 512, 1024, 6),
    "t5-v1.1-base": _t5_1_1(12, 768, 2048, 12),
    "t5-v1.1-large": _t5_1_1(24, 1024, 2816, 16),
    "t5-v1.1-xl": _t5_1_1(24, 2048, 5120, 32),
    "t5-v1.1-xxl": _t5_1_1(24, 4096, 10240, 64),
    **{f"mt5-{size}": _t5_1_1(*shape, vocab_size=250112) for size, shape in MULTILINGUAL.items()},
    **{
        f"umt5-{size}": _t5_1_1(
            *shape, vocab_size=256384, relative_attention_bias_per_layer=True, scale_untied_output=True
        )
        for size, shape in MULTILINGUAL.items()
        if size != "large"
    },
    "megatron-t5-220m": _t5(12, 768, 3072, 12, **MEGATRON_T5),
}


# -- FLOPs for each sample (counted as in mt_models.flops) -------------------------------------------


@dataclass(frozen=True)
class SampleFlops(Flops):
    """Forward FLOPs for each sample, over all positions and layers."""

    encoder_attention_projections: float
    encoder_attention_core: float
    encoder_feed_forward: float
    decoder_attention_projections: float
    decoder_attention_core: float
    cross_attention_projections: float
    """Queries and output at the decoder's positions, keys and values at the encoder's."""
    cross_attention_core: float
    decoder_feed_forward: float
    output: float
    """Logits."""


def flops_per_sample(
    config: T5Config, seq_length: int, decoder_seq_length: int, *, convention: Convention = "seen"
) -> SampleFlops:
    """seq_length, decoder_seq_length: positions of encoder and decoder, padding included. convention: of the decoder's
    self-attention. Raises ConfigError when the vocabulary is unknown."""
    encoder, decoder = config.num_layers, config.decoder_layers
    # Two matrices [H, N D] for each position: queries and output in the decoder, keys and values in the encoder.
    width = 4 * config.hidden_size * config.num_attention_heads * config.head_dim
    own_keys = mean_keys(decoder_seq_length, None, convention)
    return SampleFlops(
        encoder_attention_projections=encoder * seq_length * projection_flops(config),
        encoder_attention_core=encoder * seq_length * core_flops(config, seq_length),
        encoder_feed_forward=encoder * seq_length * dense_feed_forward_flops(config),
        decoder_attention_projections=decoder * decoder_seq_length * projection_flops(config),
        decoder_attention_core=decoder * decoder_seq_length * core_flops(config, own_keys),
        cross_attention_projections=decoder * width * (decoder_seq_length + seq_length),
        cross_attention_core=decoder * decoder_seq_length * core_flops(config, seq_length),
        decoder_feed_forward=decoder * decoder_seq_length * dense_feed_forward_flops(config),
        output=decoder_seq_length * output_flops(config.hidden_size, config.vocab_size),
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`. A data set without data.decoder_seq_length has texts of one length."""
    model: Any = config.model
    length = config.data.seq_length
    return flops_per_sample(model, length, getattr(config.data, "decoder_seq_length", length)).training
