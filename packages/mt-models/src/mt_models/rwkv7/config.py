"""Configuration of RWKV-7, its published sizes and its FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import NonNegativeFloat, PositiveInt
from mt_core.config.schema import Config, ModelConfig
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import refuse_divided_sequences
from mt_models.flops import Convention, Flops, output_flops


class Rwkv7Config(ModelConfig):
    """RWKV-7 (Peng et al., RWKV-7 "Goose", 2025)."""

    num_layers: PositiveInt
    """Layers of time mixing and channel mixing."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    head_size: PositiveInt = 64
    """Channels of a head; its state has head_size x head_size numbers."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the channel mixing. Default: 4 hidden_size."""
    decay_lora_rank: PositiveInt = 64
    """Channels between the two matrices that decays come from."""
    rate_lora_rank: PositiveInt = 64
    """The same of the rates of removal."""
    value_lora_rank: PositiveInt = 32
    """The same of the mix of a layer's values with those of the first layer."""
    gate_lora_rank: PositiveInt = 128
    """The same of the gate of the output."""
    max_position_embeddings: PositiveInt = 4096
    """Length of the sequences that the model was trained on. It has no positions, and takes longer ones."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Added to the variance; of the norms of heads head_size times as much."""
    untie_embeddings_and_output_weights: bool = True
    """The output projection has a matrix of its own."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial matrices."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    chunk_size: Annotated[int, Field(ge=1, le=64)] = 32
    """Positions that training computes together. Changes speed, memory and rounding, not the result."""
    linear_attention_backend: Literal["auto", "torch", "fla", "triton"] = "auto"
    """What computes the recurrence: torch, the kernels of flash-linear-attention (fla), mt's Triton kernels, or auto,
    which is fla on a GPU where it is installed, and else torch. triton takes parameters in bf16 and heads of at most
    128 channels, and has no chunks."""

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_size

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)

    @property
    def normalization(self) -> Literal["LayerNorm"]:
        return "LayerNorm"


def check_rwkv7(config: Config) -> None:
    """Raise ConfigError for heads that do not divide the width, or ranks the heads."""
    model = config.model
    assert isinstance(model, Rwkv7Config)
    if model.hidden_size % model.head_size:
        raise ConfigError(
            f"model.head_size={model.head_size} does not divide model.hidden_size={model.hidden_size}; it can be "
            f"{listed(divisors(model.hidden_size))}"
        )
    size, key = config.parallel.tensor_model_parallel_size, "parallel.tensor_model_parallel_size"
    must_divide(key, size, "model.hidden_size / model.head_size (a rank has whole heads)", model.num_heads)
    must_divide(key, size, "the width of the channel mixing (model.ffn_hidden_size)", model.ffn_size)
    # The state is passed on from position to position, and each position reads the one before.
    refuse_divided_sequences(config)


MEGATRON = MegatronMap(unsupported="Megatron has no RWKV")


# -- published sizes -----------------------------------------------------------------------------------


def _world(layers: int, hidden: int, decay: int, rate: int, value: int, gate: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "decay_lora_rank": decay,
            "rate_lora_rank": rate,
            "value_lora_rank": value,
            "gate_lora_rank": gate,
            "vocab_size": 65536,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "rwkv7-0.1b": _world(12, 768, 64, 64, 32, 128),
    "rwkv7-0.4b": _world(24, 1024, 64, 64, 32, 128),
    "rwkv7-1.5b": _world(24, 2048, 96, 96, 64, 256),
    "rwkv7-2.9b": _world(32, 2560, 96, 96, 64, 320),
    "rwkv7-7.2b": _world(32, 4096, 128, 128, 96, 480),
}


# -- FLOPs for each token, counted as in mt_models.flops -----------------------------------------------


@dataclass(frozen=True)
class Rwkv7Flops(Flops):
    """Forward FLOPs for each token, over all layers."""

    projections: float
    """Reads, keys, values and the output of time mixing."""
    low_rank: float
    """Decays, rates, the mix of values, gates."""
    rule: float
    """The state read, changed and written at each position."""
    feed_forward: float
    output: float
    """Logits."""


def flops_per_token(config: Rwkv7Config, seq_length: int, *, convention: Convention = "seen") -> Rwkv7Flops:
    """Raises ConfigError when the vocabulary is unknown. The rule is counted as the recurrence."""
    hidden, layers = config.hidden_size, config.num_layers
    ranks = layers * (config.decay_lora_rank + config.rate_lora_rank + config.gate_lora_rank)
    # The first layer's values are its own.
    ranks += (layers - 1) * config.value_lora_rank
    return Rwkv7Flops(
        projections=layers * 8 * hidden**2,
        low_rank=4 * hidden * ranks,
        # Four products of a vector and a matrix of each head: looked up, removed, written, read.
        rule=layers * 8 * hidden * config.head_size,
        feed_forward=layers * 4 * hidden * config.ffn_size,
        output=output_flops(hidden, config.vocab_size),
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
