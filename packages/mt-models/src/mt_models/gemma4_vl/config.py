"""Configuration of Gemma 4 with pictures: its vision transformer, its decoder, how the two meet; sizes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.gemma4.config import Gemma4Config, shrink_gemma4
from mt_models.gemma4.flops import flops_per_token
from mt_models.gemma4.presets import PRESETS as DECODERS
from mt_models.llava.config import check_decoder, validated
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_samples,
    largest_image_flops,
    refuse_context_parallel,
)
from mt_models.vision.config import check_tensor_parallel


class Gemma4VisionConfig(MergedPatchConfig):
    """The vision transformer of Gemma 4 (2026): patches of images of any size, learned and rotary positions of rows and
    columns, norms before and behind attention and the gated feed-forward, pooled squares of patches."""

    kv_channels: PositiveInt | None = None
    """Size of a head. Default: hidden_size / num_attention_heads."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads. Default: num_attention_heads."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the mean square."""
    patch_dim: PositiveInt = 16
    """Side of a patch in pixels."""
    spatial_merge_size: PositiveInt = 3
    """So many by so many patches become one vector of the decoder, which is made of their mean."""
    num_position_embeddings: PositiveInt = 10240
    """Learned positions, as many of rows as of columns."""
    rotary_base: PositiveFloat = 100.0
    """Base of the rotary wavelengths."""
    clipped_linears: bool = False
    """Matrices have bounds of what they read and of what they give, which are stored with the weights and not trained.
    """
    standardized: bool = False
    """Pooled vectors lose a mean and are scaled, each channel by numbers that are stored and not trained."""

    # Values of the shared blocks' keys that are not those of other encoders.

    @property
    def activation(self) -> str:
        return "geglu_tanh"

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads


class Gemma4VLDecoderConfig(Gemma4Config):
    """Gemma 4, some sizes of which let the positions of an image see one another."""

    family: Literal["gemma4"] = "gemma4"
    """The decoder's family."""
    bidirectional_images: bool = False
    """In local layers all positions of an image within the window see one another; else they see those before alone."""
    per_layer_image_token: NonNegativeInt = 0
    """The token whose embeddings of each layer positions of images have. They are not trained there."""

    @property
    def has_image_patterns(self) -> bool:
        return self.bidirectional_images


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", Gemma4VisionConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", Gemma4VLDecoderConfig, value) if isinstance(value, Mapping) else value


class Gemma4VLConfig(DynamicResolutionConfig):
    """A vision transformer in front of Gemma 4."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_markers": "gemma4",
        "size_rule": "fill",
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (1, 280)

    vision_model: Annotated[Gemma4VisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[Gemma4VLDecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family gemma4, and those of its images. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 258880
    """The id that stands for an image in the text, once for each of its pooled squares of patches."""


# -- rules -------------------------------------------------------------------------------------------


def check_gemma4_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, Gemma4VLConfig)
    refuse_context_parallel(config)
    _check_tower(model.vision_model, config)
    _check_image_attention(model.language_model)
    check_samples(model, config)
    check_decoder(model, config)


def _check_tower(tower: Gemma4VisionConfig, config: Config) -> None:
    section = "model.vision_model"
    if tower.kv_channels is None:
        must_divide(
            f"{section}.num_attention_heads", tower.num_attention_heads, f"{section}.hidden_size", tower.hidden_size
        )
    must_divide(
        f"{section}.num_query_groups", tower.query_groups, f"{section}.num_attention_heads", tower.num_attention_heads
    )
    must_divide(
        "parallel.tensor_model_parallel_size",
        config.parallel.tensor_model_parallel_size,
        f"{section}.num_query_groups",
        tower.query_groups,
    )
    if tower.head_dim % 4:
        raise ConfigError(
            f"{section}.kv_channels={tower.head_dim} has to be a multiple of 4: one half of the channels of a head is "
            "turned by the row of a patch, the other by its column"
        )
    check_tensor_parallel(tower, config, section)


def _check_image_attention(decoder: Gemma4VLDecoderConfig) -> None:
    if decoder.bidirectional_images and decoder.attention_backend == "flex":
        raise ConfigError(
            "model.language_model.attention_backend=flex does not serve model.language_model.bidirectional_images=true:"
            " it has no mask that all heads share; use auto, sdpa or eager"
        )


def shrink_gemma4_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The image token is behind every vocabulary."""
    tower, decoder = dict(model["vision_model"]), dict(model["language_model"])
    tower |= {"patch_dim": 2, "spatial_merge_size": 2, "num_position_embeddings": 64}
    tower |= {"kv_channels": None, "num_query_groups": None}
    decoder |= shrink_gemma4(decoder, seq_length)
    return {
        "vision_model": tower,
        "language_model": decoder,
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- published sizes ---------------------------------------------------------------------------------

SMALL_TOWER = {
    "num_layers": 16,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_hidden_size": 3072,
    "clipped_linears": True,
}
LARGE_TOWER = {
    "num_layers": 27,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "ffn_hidden_size": 4304,
    "standardized": True,
}


def _with_tower(name: str, tower: dict[str, Any], *, bidirectional: bool) -> dict[str, Any]:
    decoder = {key: value for key, value in DECODERS[name]["model"].items() if key != "vocab_size"}
    return {
        "model": {
            "vision_model": tower,
            "language_model": {**decoder, "bidirectional_images": bidirectional},
            "vocab_size": DECODERS[name]["model"]["vocab_size"],
            "image_token_index": 258880,
        },
        "data": DECODERS[name]["data"],
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gemma4-e2b-vl": _with_tower("gemma4-e2b", SMALL_TOWER, bidirectional=False),
    "gemma4-e4b-vl": _with_tower("gemma4-e4b", SMALL_TOWER, bidirectional=False),
    "gemma4-31b-vl": _with_tower("gemma4-31b", LARGE_TOWER, bidirectional=True),
    "gemma4-26b-a4b-vl": _with_tower("gemma4-26b-a4b", LARGE_TOWER, bidirectional=True),
}


# -- FLOPs (counted as in mt_models.flops) -----------------------------------------------------------


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`: of a sample with one image, the largest that it can have."""
    model: Any = config.model
    length = config.data.seq_length
    text = length * flops_per_token(model.decoder, length).training
    return largest_image_flops(config, model.vision_model.hidden_size * model.decoder.hidden_size) + text


MEGATRON = MegatronMap(unsupported="Megatron has no vision transformer with pooled patches, and no Gemma 4")
