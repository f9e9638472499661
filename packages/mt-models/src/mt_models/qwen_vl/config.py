"""Configuration of Qwen2.5-VL: that of its vision transformer, of its decoder, and how the two meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.checks import must_divide
from mt_core.config.schema import Config, NonNegativeInt, PositiveInt
from mt_core.errors import ConfigError
from mt_models.blocks.encoder_config import EncoderConfig
from mt_models.llava.config import (
    CLIP_MEAN,
    CLIP_STD,
    Part,
    VisionLanguageConfig,
    check_decoder,
    require_data,
    validated,
)
from mt_models.qwen.config import QwenConfig
from mt_models.vision.config import check_tensor_parallel


class QwenVisionConfig(EncoderConfig):
    """The vision transformer of Qwen2.5-VL (Technical Report, 2025): patches of images of any size, 2D rotary
    positions, RMSNorm, SwiGLU, attention within windows but for some layers."""

    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the gated feed-forward. Default: 4 hidden_size."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the mean square."""
    patch_dim: PositiveInt = 14
    """Side of a patch in pixels."""
    spatial_merge_size: PositiveInt = 2
    """So many by so many patches become one vector of the decoder."""
    temporal_patch_size: PositiveInt = 2
    """Frames of a patch. A still image is a film in which all frames are equal."""
    num_channels: PositiveInt = 3
    """Colours of a pixel."""
    window_size: PositiveInt = 112
    """Side in pixels of the windows within which patches attend to one another. It covers whole merged patches."""
    full_attention_layers: list[NonNegativeInt] = Field(default_factory=lambda: [7, 15, 23, 31])
    """Layers, counted from 0, in which all patches of an image attend to one another."""

    @property
    def merged_side(self) -> int:
        """Pixels of what one vector of the decoder stands for."""
        return self.patch_dim * self.spatial_merge_size

    @property
    def merged_patches(self) -> int:
        return self.spatial_merge_size**2

    @property
    def window_side(self) -> int:
        """Of a window in merged patches."""
        return self.window_size // self.merged_side

    # Fixed values for keys that the shared blocks read.

    @property
    def normalization(self) -> Literal["RMSNorm"]:  # type: ignore[override]
        return "RMSNorm"

    @property
    def activation(self) -> Literal["swiglu"]:
        return "swiglu"

    @property
    def attention_dropout(self) -> float:
        return 0.0

    @property
    def hidden_dropout(self) -> float:
        return 0.0


class QwenVLDecoderConfig(QwenConfig):
    """Qwen2 with multimodal rotary positions."""

    family: Literal["qwen"] = "qwen"
    """The decoder's family."""
    add_qkv_bias: bool = True
    """Biases on queries, keys and values."""
    qk_layernorm: bool = False
    """Normalize each query and key head before positions are applied."""
    max_position_embeddings: PositiveInt = 128000
    """Positions that the model was trained for. With rope scaling more of them can be used."""
    rotary_base: Annotated[float, Field(gt=0)] = 1000000.0
    """Base of the rotary wavelengths."""
    mrope_section: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] = Field(
        default_factory=lambda: [16, 24, 24]
    )
    """Pairs of channels of a head that are turned by the position in time, height and width; half of a head together.
    """


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", QwenVisionConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", QwenVLDecoderConfig, value) if isinstance(value, Mapping) else value


class QwenVLConfig(VisionLanguageConfig):
    """A vision transformer in front of a Qwen2 decoder, as Qwen2.5-VL combines them."""

    vision_model: Annotated[QwenVisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[QwenVLDecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family qwen, and mrope_section. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 151655
    """The id that stands for an image in the text, once for each of its merged patches."""
    freeze: list[Part] = Field(default_factory=list)
    """Parts that are not trained: vision_model, vision_projection (the patch merger), language_model."""

    @property
    def image_seq_length(self) -> int:
        """Positions that a merged patch takes in the text."""
        return 1

    @property
    def image_data_keys(self) -> dict[str, Any]:
        side = self.vision_model.merged_side
        return {
            "img_h": side,
            "img_w": side,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
            "image_token_index": self.image_token_index,
            "image_seq_length": self.image_seq_length,
            "resample": "bicubic",
            "image_markers": "qwen2_vl",
            "dynamic_resolution": True,
            "min_pixels": 4 * side**2,
            "max_pixels": 16384 * side**2,
        }


def check_qwen_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, QwenVLConfig)
    if (size := config.parallel.context_parallel_size) > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={size} divides sequences, and model.family=qwen_vl puts the features of "
            "an image at any place of a whole one; set it to 1, and use parallel.sequence_parallel for long sequences"
        )
    _check_tower(model.vision_model, config)
    _check_sections(model.language_model)
    _check_samples(model, config)
    check_decoder(model, config)


def _check_tower(tower: QwenVisionConfig, config: Config) -> None:
    section = "model.vision_model"
    must_divide(
        f"{section}.num_attention_heads", tower.num_attention_heads, f"{section}.hidden_size", tower.hidden_size
    )
    if tower.head_dim % 4:
        raise ConfigError(
            f"{section}.hidden_size / {section}.num_attention_heads={tower.head_dim} has to be a multiple of 4: rotary "
            "positions turn one half of the pairs of channels by the row and the other by the column of a patch"
        )
    if not tower.window_side:
        raise ConfigError(
            f"{section}.window_size={tower.window_size} is smaller than {section}.patch_dim={tower.patch_dim} times "
            f"{section}.spatial_merge_size={tower.spatial_merge_size}; use at least {tower.merged_side}"
        )
    if beyond := [layer for layer in tower.full_attention_layers if layer >= tower.num_layers]:
        raise ConfigError(
            f"{section}.full_attention_layers={tower.full_attention_layers} has {beyond[0]}, and layers go from 0 to "
            f"{tower.num_layers - 1}"
        )
    check_tensor_parallel(tower, config, section)


def _check_sections(decoder: QwenVLDecoderConfig) -> None:
    sections, pairs = decoder.mrope_section, decoder.head_dim // 2
    if sum(sections) != pairs:
        raise ConfigError(
            f"model.language_model.mrope_section={sections} has {sum(sections)} pairs of channels, and a head has "
            f"{pairs}; they have to be as many"
        )
    if decoder.rope_scaling_type == "dynamic":
        raise ConfigError(
            "model.language_model.rope_scaling_type=dynamic scales by the length of a text, which positions of images "
            "do not count; use yarn or linear"
        )


def _check_samples(model: QwenVLConfig, config: Config) -> None:
    side = model.vision_model.merged_side
    require_data(
        config,
        {
            "image_token_index": (model.image_token_index, "model.image_token_index"),
            "dynamic_resolution": (True, "since model.family=qwen_vl takes images in their own proportions"),
            "image_seq_length": (1, "the positions of a merged patch"),
            "img_h": (side, "the side in pixels of patches that are merged"),
            "img_w": (side, "the side in pixels of patches that are merged"),
            "num_channels": (model.vision_model.num_channels, "model.vision_model.num_channels"),
        },
    )
