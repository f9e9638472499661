"""Configuration of Muse Glimmer's decoder, and its published size."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder

PositiveFloat = Annotated[float, Field(gt=0)]
GLOBAL, NO_ROPE = "global_layer_freq", "no_rope_freq"


class MuseGlimmerConfig(RMSNormDecoderConfig):
    """Muse Glimmer (Meta, 2026), text only."""

    sliding_window: PositiveInt = 2048
    """In local layers a position sees itself and the sliding_window - 1 before it."""
    global_layer_freq: PositiveInt | str = 4
    """Every so many layers, counted from the last, one sees everything before it; or a pattern with a 1 for each such
    layer, such as "([0]*3+[1]*1)*13"."""
    no_rope_freq: PositiveInt | str | None = 4
    """Every so many layers, counted from the last, one has no rotary positions; or a pattern with a 1 for each layer
    without. null: all layers have them."""
    post_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-8
    """Added to the mean square in the norms behind attention and feed-forward."""
    qk_scale_factor: float = 3.87
    """Multiplies queries behind their norm. Scores are divided by the square root of the size of a head too."""
    output_multiplier: float = 1.0
    """Multiplies logits before their soft cap."""
    final_logit_softcapping: PositiveFloat = 20.0
    """Logits x become c tanh(x / c)."""
    image_token_id: NonNegativeInt | None = None
    """The token in whose place a picture would be, which this family has not: it is embedded as token 0, as in a text
    without pictures. Default: none."""
    video_token_id: NonNegativeInt | None = None
    """The same of a video."""

    @property
    def tokens_of_other_media(self) -> tuple[int, ...]:
        """Tokens that are embedded as token 0."""
        return tuple(i for i in (self.image_token_id, self.video_token_id) if i is not None)

    def window_of(self, layer: int) -> int | None:
        return None if self.marked_layers(GLOBAL)[layer] else self.sliding_window

    def rotates(self, layer: int) -> bool:
        return not self.marked_layers(NO_ROPE)[layer]

    def marked_layers(self, key: str) -> list[bool]:
        """For each layer whether `key`, a frequency or a pattern, marks it. Raises ConfigError for a pattern of another
        length."""
        freq = getattr(self, key)
        if isinstance(freq, str):
            return read_pattern(freq, self.num_layers, f"model.{key}")
        return every_from_last(freq, self.num_layers)

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        """Their norms have no weights, and are those of the layer."""
        return False


def every_from_last(freq: int | None, layers: int) -> list[bool]:
    """For each layer whether it is one of every `freq`, counted from the last; None: no layer."""
    return [freq is not None and (layers - 1 - layer) % freq == 0 for layer in range(layers)]


def check_muse_glimmer(config: Config) -> None:
    check_decoder(config)
    assert isinstance(config.model, MuseGlimmerConfig)
    for key in (GLOBAL, NO_ROPE):
        config.model.marked_layers(key)  # raises for a pattern that does not fit


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "muse-glimmer-30b": {
        "model": {
            "num_layers": 52,
            "hidden_size": 6656,
            "num_attention_heads": 32,
            "num_query_groups": 2,
            "kv_channels": 128,
            "ffn_hidden_size": 19968,
            "vocab_size": 202048,
            "max_position_embeddings": 131072,
            "norm_epsilon": 1e-5,
            "output_multiplier": 0.19611613513818404,
            "image_token_id": 200092,
            "video_token_id": 200091,
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(
    unsupported="Megatron has no norms behind attention and feed-forward, no norm of token embeddings and no factor on "
    "logits"
)
