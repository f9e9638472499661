"""Configuration of Qwen2.5-VL: its vision transformer, its decoder, how the two meet; published sizes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.flops import Convention, Flops, TokenFlops, flops_per_token
from mt_models.llava.config import (
    CLIP_MEAN,
    CLIP_STD,
    check_decoder,
    validated,
)
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_merged_patches,
    check_samples,
    largest_image,
    refuse_context_parallel,
)
from mt_models.qwen.config import QwenConfig
from mt_models.vision.config import ImageFlops


class QwenVisionConfig(MergedPatchConfig):
    """The vision transformer of Qwen2.5-VL (Technical Report, 2025): patches of images of any size, 2D rotary
    positions, RMSNorm, SwiGLU, attention within windows but for some layers."""

    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the gated feed-forward. Default: 4 hidden_size."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the mean square."""
    temporal_patch_size: PositiveInt = 2
    """Frames of a patch. A still image is a film in which all frames are equal."""
    window_size: PositiveInt = 112
    """Side in pixels of the windows within which patches attend to one another. It covers whole merged patches."""
    tokens_per_second: PositiveInt = 2
    """Positions in time of a second of a video."""
    full_attention_layers: list[NonNegativeInt] = Field(default_factory=lambda: [7, 15, 23, 31])
    """Layers, counted from 0, in which all patches of an image attend to one another."""

    @property
    def window_side(self) -> int:
        """Side of a window in merged patches."""
        return self.window_size // self.merged_side

    # Fixed values for keys that the shared blocks read.

    @property
    def normalization(self) -> Literal["RMSNorm"]:  # type: ignore[override]
        return "RMSNorm"

    @property
    def activation(self) -> Literal["swiglu"]:
        return "swiglu"


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


class QwenVLConfig(DynamicResolutionConfig):
    """A vision transformer in front of a Qwen2 decoder, as Qwen2.5-VL combines them."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_markers": "qwen2_vl",
        "video_rule": "qwen2_vl",
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (4, 16384)
    PUBLISHED_VIDEO_CELLS: ClassVar[tuple[int, int] | None] = (128, 768)
    TAKES_VIDEOS: ClassVar[bool] = True
    VIDEO_RULE: ClassVar[str] = "qwen2_vl"

    vision_model: Annotated[QwenVisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[QwenVLDecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family qwen, and mrope_section. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 151655
    """The id that stands for an image in the text, once for each of its merged patches."""


def check_qwen_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, QwenVLConfig)
    refuse_context_parallel(config)
    _check_tower(model.vision_model, config)
    _check_sections(model.language_model)
    check_samples(model, config)
    check_decoder(model, config)


def _check_tower(tower: QwenVisionConfig, config: Config) -> None:
    section = "model.vision_model"
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
    check_merged_patches(tower, config)


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


# -- published sizes ---------------------------------------------------------------------------------

LAYERS = {"num_layers": 32, "hidden_size": 1280, "num_attention_heads": 16}


def _qwen25_vl(
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    ffn: int,
    vision_ffn: int,
    *,
    vocab: int = 152064,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model": {
            "vision_model": {**LAYERS, "ffn_hidden_size": vision_ffn},
            "language_model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_query_groups": groups,
                "ffn_hidden_size": ffn,
                "untie_embeddings_and_output_weights": not tied,
            },
            "vocab_size": vocab,
            "image_token_index": 151655,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": _qwen25_vl(36, 2048, 16, 2, 11008, 3420, vocab=151936, tied=True),
    "qwen2.5-vl-7b": _qwen25_vl(28, 3584, 28, 4, 18944, 3420),
    "qwen2.5-vl-32b": _qwen25_vl(64, 5120, 40, 8, 27648, 3456),
    "qwen2.5-vl-72b": _qwen25_vl(80, 8192, 64, 8, 29568, 3456),
}


# -- a small model for checks ------------------------------------------------------------------------


def shrink_qwen_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Both kinds of attention stay. The image token is behind every vocabulary."""
    tower, decoder = dict(model["vision_model"]), dict(model["language_model"])
    merge = tower["spatial_merge_size"]
    tower |= {"patch_dim": 2, "window_size": 4 * merge, "full_attention_layers": [tower["num_layers"] - 1]}
    heads = decoder.get("kv_channels") or decoder["hidden_size"] // decoder["num_attention_heads"]
    height = heads // 2 // 3
    decoder["mrope_section"] = [heads // 2 - 2 * height, height, height]
    return {
        "vision_model": tower,
        "language_model": decoder,
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- FLOPs for each sample (counted as in mt_models.flops) -------------------------------------------

Grid = tuple[int, int]
"""Rows and columns of merged patches of an image."""


@dataclass(frozen=True)
class SampleFlops(Flops):
    """Forward FLOPs for each sample."""

    vision_model: tuple[ImageFlops, ...]
    """FLOPs of each image."""
    vision_projection: float
    """FLOPs for all images."""
    language_model: TokenFlops
    """For each position, those of images included."""
    positions: int

    @property
    def forward(self) -> float:
        images = sum(image.forward for image in self.vision_model) + self.vision_projection
        return images + self.positions * self.language_model.forward


def flops_per_sample(
    config: QwenVLConfig, seq_length: int, grids: Sequence[Grid] = (), *, convention: Convention = "seen"
) -> SampleFlops:
    """seq_length: with the positions of images. grids: of the images. convention: see mt_models.flops."""
    vision, cells = config.vision_model, sum(rows * columns for rows, columns in grids)
    width = vision.hidden_size * vision.merged_patches
    return SampleFlops(
        vision_model=tuple(image_flops(vision, grid) for grid in grids),
        vision_projection=2.0 * cells * width * (width + config.decoder.hidden_size),
        language_model=flops_per_token(config.decoder, seq_length, convention=convention),
        positions=seq_length,
    )


def image_flops(config: QwenVisionConfig, grid: Grid) -> ImageFlops:
    """Scores count for the patches of the same window, in layers of full attention for all of the image. Patches
    are embedded once, not once a frame."""
    hidden, merged = config.hidden_size, config.merged_patches
    patches = grid[0] * grid[1] * merged
    full = len(set(config.full_attention_layers))
    # Pairs of patches: of the whole image in layers of full attention; elsewhere m^2 x m^2 for each pair of cells.
    scores = full * patches**2 + (config.num_layers - full) * merged**2 * _pairs_in_windows(grid, config.window_side)
    return ImageFlops(
        patches=2 * patches * config.num_channels * config.patch_dim**2 * hidden,
        attention_projections=config.num_layers * patches * 8 * hidden**2,
        attention_core=4 * scores * hidden,
        feed_forward=config.num_layers * patches * 6 * hidden * config.ffn_size,
        pooler=0.0,
        output=0.0,
    )


def _pairs_in_windows(grid: Grid, side: int) -> int:
    """Pairs of merged patches that are in one window."""

    def squares(length: int) -> int:
        # Windows are products of a range of rows and one of columns, so that pairs in them are a product
        # too; the last window of each direction has what is left over.
        return length // side * side**2 + (length % side) ** 2

    return squares(grid[0]) * squares(grid[1])


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`: of a sample with one image, the largest that it can have, nearly a square."""
    model: Any = config.model
    cells = largest_image(config)
    rows = math.isqrt(cells)
    grids = [(rows, cells // rows)] if cells else []
    return float(flops_per_sample(model, config.data.seq_length, grids).training)


MEGATRON = MegatronMap(unsupported="Megatron-Core has no vision transformer with windows and rotary positions")
