"""Configuration of LFM3, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder

CONV, WINDOW, GLOBAL = "C", "W", "G"
"""Letters of layer_pattern."""


def usual_pattern(layers: int) -> str:
    """layer_pattern where none is given."""
    return (CONV * 2 + GLOBAL + CONV + (WINDOW + CONV + GLOBAL + CONV) * layers)[:layers]


class Lfm3Config(RMSNormDecoderConfig):
    """LFM3 (Liquid AI, 2026)."""

    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    untie_embeddings_and_output_weights: bool = False
    """The output projection has a matrix of its own."""
    layer_pattern: str | None = None
    """A letter for each layer: C a convolution, W attention within the window, G attention to everything before.
    Default: CCGC, then WCGC again and again."""
    conv_kernel: PositiveInt = 7
    """Positions that a convolution sees: its own and those before it."""
    conv_bias: bool = False
    """Biases in layers with a convolution."""
    sliding_window: PositiveInt = 256
    """In layers with a window a position sees itself and the sliding_window - 1 before it."""
    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    use_attention_gate: bool = True
    """Each head's output is multiplied by a gate, the sigmoid of a projection of the layer's input."""
    use_sandwich_norm: bool = True
    """Norms behind attention, convolutions and feed-forwards, beside those before them."""
    rotary_base: PositiveFloat = 1000000.0
    """Base of the rotary wavelengths of layers without a window, to which rope scaling applies."""
    rotary_base_local: PositiveFloat = 10000.0
    """Base of the rotary wavelengths of layers with a window, which rotate by all frequencies."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the frequencies of a whole head that layers without a window rotate by; the others are 0."""

    @property
    def layer_kinds(self) -> str:
        """The letters of all layers. Raises ConfigError for a pattern with others, or of another length."""
        if self.layer_pattern is None:
            return usual_pattern(self.num_layers)
        if len(self.layer_pattern) != self.num_layers or set(self.layer_pattern) - {CONV, WINDOW, GLOBAL}:
            raise ConfigError(
                f"model.layer_pattern={self.layer_pattern!r} has to be one of the letters {CONV} (convolution), "
                f"{WINDOW} (attention within the window) and {GLOBAL} (attention to everything) for each of the "
                f"model.num_layers={self.num_layers}"
            )
        return self.layer_pattern

    def is_convolution(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has a convolution in place of attention."""
        return self.layer_kinds[layer] == CONV

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_kinds[layer] == WINDOW else None

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_lfm3(config: Config) -> None:
    """Raise ConfigError for a pattern, frequencies or a layout that does not fit."""
    check_decoder(config)
    model, parallel = config.model, config.parallel
    assert isinstance(model, Lfm3Config)
    _check_rotary(model)
    if CONV in model.layer_kinds:
        # Ranks hold channels of the convolutions, and exchange positions for them.
        size = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        key = "parallel.tensor_model_parallel_size x parallel.context_parallel_size"
        must_divide(key, size, "model.hidden_size", model.hidden_size)


def _check_rotary(model: Lfm3Config) -> None:
    if model.rope_scaling_type not in ("none", "linear"):
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not defined for the frequencies of an lfm3; it can "
            "be none or linear"
        )
    if int(model.rotary_percent * model.head_dim // 2) == 0:
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} of {model.head_dim} channels leaves none to rotate; it has "
            f"to be at least {2 / model.head_dim:.3g}"
        )


def shrink_lfm3(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: each kind of layer that the model has, again and again."""
    kinds = "".join(dict.fromkeys(model.get("layer_pattern") or CONV + WINDOW + GLOBAL))
    layers = model["num_layers"] * -(-len(kinds) // model["num_layers"])  # a multiple, which stages divide as before
    return {
        "num_layers": layers,
        "layer_pattern": (kinds * layers)[:layers],
        "sliding_window": max(seq_length // 2, 1),
        "conv_kernel": min(model["conv_kernel"], 3),
    }


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "lfm3-1.7b": {
        "model": {
            "num_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_query_groups": 4,
            "kv_channels": 128,
            "ffn_hidden_size": 7680,
            "vocab_size": 128000,
            "max_position_embeddings": 128000,
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(unsupported="Megatron has no layers with short convolutions, and no gates of heads")
