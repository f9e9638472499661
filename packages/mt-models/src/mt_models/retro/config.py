"""Configuration of the RETRO family: keys, the rules that tie them together, published sizes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import listed
from mt_core.config.fields import PositiveInt, Probability
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import refuse_divided_sequences_and_layers
from mt_models.flops import (
    Convention,
    Flops,
    core_flops,
    dense_feed_forward_flops,
    projection_flops,
)
from mt_models.flops import (
    flops_per_token as decoder_flops_per_token,
)
from mt_models.gpt.config import SAME_KEYS, GPTConfig, check_gpt
from mt_models.llama.config import LlamaConfig

SHARED_WITH_DATA = ("retro_chunk_length", "retro_num_neighbors", "retro_num_retrieved_chunks")
"""Keys that the data set has too: its samples carry what the model expects."""
EVERY = 3
"""Layers from one with cross attention to the next."""


class RetroConfig(GPTConfig):
    """A GPT, some of whose layers attend to neighbours of the text before (Borgeaud et al., 2022)."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """learned_absolute, rope (rotary) or none; neighbours have positions of their own, from 0."""
    parallel_residual: Literal[False] = False
    """Cross attention stands between attention and feed-forward."""
    moe: None = None
    """Feed-forwards are dense."""
    parallel_residual_norms: Literal[2] = 2
    """Layers have one norm before attention and one before the feed-forward."""
    logits_scaling: None = None
    """Logits are not divided."""
    mup_base_hidden_size: None = None
    """All parameters have one learning rate."""
    mtp_num_layers: Literal[0] = 0
    """No layers of multi-token prediction."""
    enable_mhc_connections: Literal[False] = False
    """One residual stream, to which cross attention adds."""
    retro_chunk_length: PositiveInt = 64
    """Tokens of a chunk; each chunk of the text has neighbours."""
    retro_num_neighbors: PositiveInt = 2
    """Neighbours of a chunk."""
    retro_num_retrieved_chunks: PositiveInt = 2
    """Chunks of a neighbour: the one that was found, and those that follow it."""
    retro_cross_attention_layers: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """Layers that attend to neighbours, counted from 1. Default: every third from the 6th on, in models of more than
    15 layers from the 9th on."""
    retro_encoder_num_layers: PositiveInt = 2
    """Layers of the encoder of neighbours; the first attends to the chunk whose neighbours they are."""
    retro_encoder_hidden_dropout: Probability | None = None
    """hidden_dropout of the encoder of neighbours. Default: as hidden_dropout."""
    retro_encoder_attention_dropout: Probability | None = None
    """attention_dropout of the encoder of neighbours. Default: as attention_dropout."""
    retro_freeze_gpt: bool = False
    """Train only what a GPT does not have: the encoder of neighbours and the attention to them."""

    @property
    def retrieved_length(self) -> int:
        """Tokens of a neighbour."""
        return self.retro_chunk_length * self.retro_num_retrieved_chunks

    @property
    def cross_attention_layers(self) -> tuple[int, ...]:
        """Counted from 0, in order."""
        if self.retro_cross_attention_layers is not None:
            return tuple(sorted({number - 1 for number in self.retro_cross_attention_layers}))
        # Megatron's rule (retro_layer_start).
        first = 6 if self.num_layers <= 15 else 9
        return tuple(range(first - 1, self.num_layers, EVERY))

    @property
    def encoder(self) -> RetroConfig:
        """What the layers of the encoder of neighbours read."""
        hidden, attention = self.retro_encoder_hidden_dropout, self.retro_encoder_attention_dropout
        # The same widths and heads as the decoder, as in Megatron; only the dropouts may differ.
        return self.model_copy(
            update={
                "hidden_dropout": self.hidden_dropout if hidden is None else hidden,
                "attention_dropout": self.attention_dropout if attention is None else attention,
            }
        )


def check_retro(config: Config) -> None:
    """Raise ConfigError for a RETRO that cannot be built, split over ranks as configured, or read its samples."""
    model = config.model
    assert isinstance(model, RetroConfig)
    check_gpt(config)
    refuse_divided_sequences_and_layers(config)
    check_layers(model)
    _check_recompute(config)
    _check_lengths(model, config)
    _check_samples(model, config)


def check_layers(model: RetroConfig) -> None:
    """Raise ConfigError unless some layer attends to neighbours, and all that are named are there."""
    layers = model.retro_cross_attention_layers
    if layers is None and not model.cross_attention_layers:
        raise ConfigError(
            f"model.num_layers={model.num_layers} has no 6th layer, the first to attend to neighbours by default; set "
            f"model.retro_cross_attention_layers to some of {listed(list(range(1, model.num_layers + 1)))}"
        )
    beyond = [number for number in layers or [] if number > model.num_layers]
    if beyond:
        raise ConfigError(
            f"model.retro_cross_attention_layers has {listed(beyond)}, and model.num_layers={model.num_layers}; its "
            f"numbers can be 1 to {model.num_layers}"
        )


def _check_recompute(config: Config) -> None:
    recompute = config.recompute
    if recompute.recompute_granularity == "full" and recompute.recompute_method == "uniform":
        raise ConfigError(
            "recompute.recompute_method=uniform keeps one input for several layers, and in model.family=retro the "
            "neighbours are encoded in the middle of one; use recompute.recompute_method=block"
        )


def _check_lengths(model: RetroConfig, config: Config) -> None:
    seq_length, chunk = config.data.seq_length, model.retro_chunk_length
    if seq_length % chunk:
        raise ConfigError(
            f"data.seq_length={seq_length} is not a multiple of model.retro_chunk_length={chunk}; use "
            f"{max(seq_length // chunk, 1) * chunk} or {(seq_length // chunk + 1) * chunk}"
        )
    table = model.table_size
    if table is not None and model.retrieved_length > table:
        raise ConfigError(
            f"a neighbour has model.retro_chunk_length x model.retro_num_retrieved_chunks = {model.retrieved_length} "
            f"tokens, more than model.max_position_embeddings={table}; shorten it, or use more positions"
        )
    ranks = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and model.retrieved_length % ranks:
        raise ConfigError(
            f"parallel.sequence_parallel divides the {model.retrieved_length} tokens of a neighbour "
            "(model.retro_chunk_length x model.retro_num_retrieved_chunks) over "
            f"parallel.tensor_model_parallel_size={ranks} processes; make it a multiple of {ranks}"
        )


def _check_samples(model: RetroConfig, config: Config) -> None:
    data = config.data
    if data.reset_attention_mask:
        raise ConfigError(
            "data.reset_attention_mask=true keeps documents apart, and the neighbours of a chunk belong to all "
            "documents in it; set it to false for model.family=retro"
        )
    for key in SHARED_WITH_DATA:
        if not hasattr(data, key):
            raise ConfigError(
                f"data.dataset_type={data.dataset_type} has no neighbours, which model.family=retro reads; use "
                "data.dataset_type=builtin_retro or retro (or model.family=gpt)"
            )
        if getattr(data, key) != getattr(model, key):
            raise ConfigError(
                f"data.{key}={getattr(data, key)} and model.{key}={getattr(model, key)} differ; set both to one value"
            )


# -- published sizes: table 1 of Borgeaud et al. (2022), Megatron's example, and a small one for a CPU
#
# The encoder of neighbours is as wide as the decoder, as in Megatron; the paper's is 896 wide in all sizes, and its
# attention has relative positions, which are learned positions here.


def _paper(layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "kv_channels": head_dim,
            "max_position_embeddings": 2048,
            "normalization": "RMSNorm",
            "vocab_size": 128000,
        },
        "data": {"dataset_type": "retro", "seq_length": 2048},
    }


MEGATRON_RETRO: dict[str, Any] = {
    "model": {
        "num_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.007,
    },
    "data": {"dataset_type": "retro", "seq_length": 512},
}

TINY: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "retro_chunk_length": 32,
        "retro_cross_attention_layers": [3],
    },
    "data": {"dataset_type": "builtin_retro", "seq_length": 128, "retro_chunk_length": 32},
    "train": {"micro_batch_size": 16, "train_iters": 300},
    "optimizer": {"lr": 3e-3, "min_lr": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 20},
}

PRESETS: dict[str, dict[str, Any]] = {
    "retro-tiny": TINY,
    "retro-172m": _paper(12, 896, 16, 64),
    "retro-425m": _paper(12, 1536, 12, 128),
    "retro-1.5b": _paper(24, 2048, 16, 128),
    "retro-7.5b": _paper(32, 4096, 32, 128),
    "retro-megatron-353m": MEGATRON_RETRO,
}


# -- a small model for checks ------------------------------------------------------------------------

CHUNKS = 2
"""Chunks of a short sequence, so that one of them reads what was found for the one before."""


def shrink_retro(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """A chunk is half of a sequence, and the last layer attends to neighbours."""
    return {
        "retro_chunk_length": seq_length // CHUNKS,
        "retro_cross_attention_layers": [model["num_layers"]],
        "retro_encoder_num_layers": 1,
        "max_position_embeddings": model["max_position_embeddings"] and seq_length * CHUNKS,
    }


# -- FLOPs for each token (counted as in mt_models.flops) --------------------------------------------
#
# A chunk of m tokens has K neighbours of r tokens, so that a token of the text brings K r / m tokens to the encoder.


@dataclass(frozen=True)
class RetroFlops(Flops):
    """Forward FLOPs for each token of the text, over all layers."""

    attention_projections: float
    """Decoder's self-attention."""
    attention_core: float
    feed_forward: float
    output: float
    """Logits."""
    cross_attention_projections: float
    """Text's attention to neighbours; keys and values of neighbours included."""
    cross_attention_core: float
    encoder_attention_projections: float
    """Encoder of neighbours."""
    encoder_attention_core: float
    encoder_feed_forward: float
    encoder_cross_attention_projections: float
    """Neighbours' attention to the text; keys and values of the text included."""
    encoder_cross_attention_core: float


def flops_per_token(config: RetroConfig, seq_length: int, *, convention: Convention = "seen") -> RetroFlops:
    """The mean over the tokens of a sequence of whole chunks, all with neighbours.

    convention: also of the attention to neighbours, which the first m - 1 tokens have not. Raises ConfigError when the
    vocabulary is unknown.
    """
    chunk, retrieved = config.retro_chunk_length, config.retro_num_neighbors * config.retrieved_length
    ratio = retrieved / chunk
    decoder = decoder_flops_per_token(config, seq_length, convention=convention)
    pair = 4 * config.hidden_size * config.num_attention_heads * config.head_dim  # queries and output; keys and values
    # Positions m - 1 and later attend to neighbours: S - m + 1 of S.
    attending = 1.0 if convention == "full" else (seq_length - chunk + 1) / seq_length
    crossing, encoder = len(config.cross_attention_layers), config.retro_encoder_num_layers
    return RetroFlops(
        attention_projections=decoder.attention_projections,
        attention_core=decoder.attention_core,
        feed_forward=decoder.feed_forward,
        output=decoder.output,
        cross_attention_projections=crossing * pair * (1 + ratio),
        cross_attention_core=crossing * attending * core_flops(config, retrieved),
        encoder_attention_projections=encoder * ratio * projection_flops(config),
        encoder_attention_core=encoder * ratio * core_flops(config, config.retrieved_length),
        encoder_feed_forward=encoder * ratio * dense_feed_forward_flops(config),
        # Once: the first layer of the encoder alone attends to the text.
        encoder_cross_attention_projections=pair * (1 + ratio),
        encoder_cross_attention_core=ratio * core_flops(config, chunk),
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training


MEGATRON = MegatronMap(
    unsupported="Megatron-Core removed RETRO in January 2026, and its chunked attention had other parameters"
)


# -- start from a Llama: its section [model] in the keys of a GPT ------------------------------------

SAME = (*SAME_KEYS, "attention_backend", "max_position_embeddings")
"""Keys of both families."""


def retro_keys_of_llama(stored: Mapping[str, Any]) -> dict[str, Any]:
    """See `mt_core.specs.ModelKeys`. Raises ConfigError for experts, rope scaling, and biases in some layers only."""
    llama = LlamaConfig.model_validate(stored)
    for key, allowed in (("moe", None), ("rope_scaling_type", "none"), ("mlp_bias", llama.attention_bias)):
        if getattr(llama, key) != allowed:
            raise ConfigError(
                f"the Llama of the checkpoint has model.{key}={getattr(llama, key)}, which model.family=retro cannot "
                f"have (it has to be {allowed}); start from another checkpoint"
            )
    return {
        **{key: getattr(llama, key) for key in SAME},
        "ffn_hidden_size": llama.ffn_size,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": llama.mlp_bias,
    }
