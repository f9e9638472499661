"""Configuration of the RETRO family, with the rules that tie its keys together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mt_core.config.checks import listed
from mt_core.config.schema import Config, PositiveInt, Probability
from mt_core.errors import ConfigError
from mt_models.blocks.encoder_checks import refuse_divided_sequences_and_layers
from mt_models.gpt.config import GPTConfig, check_gpt

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
    given = model.retro_cross_attention_layers
    if given is None and not model.cross_attention_layers:
        raise ConfigError(
            f"model.num_layers={model.num_layers} has no 6th layer, the first to attend to neighbours by default; set "
            f"model.retro_cross_attention_layers to some of {listed(list(range(1, model.num_layers + 1)))}"
        )
    beyond = [number for number in given or [] if number > model.num_layers]
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
