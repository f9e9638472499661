"""Configuration of MiniMax-M3 with pictures: its vision transformer, its decoder, how the two meet; size and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.llava.config import CLIP_MEAN, CLIP_STD, Part, check_decoder, validated
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_merged_patches,
    check_samples,
    largest_image_flops,
    refuse_context_parallel,
)
from mt_models.minimax_m3.config import PRESETS as DECODERS
from mt_models.minimax_m3.config import MiniMaxM3Config, shrink_minimax_m3
from mt_models.minimax_m3.flops import flops_per_token


class MiniMaxVisionConfig(MergedPatchConfig):
    """The vision transformer of MiniMax-M3 (MiniMax, 2026): patches of images of any size, rotary positions in time,
    height and width, LayerNorm before the layers and in each, attention among all patches of an image."""

    temporal_patch_size: PositiveInt = 2
    """Frames of a patch. A still image is a film in which all frames are equal."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary wavelengths."""

    @property
    def pairs_of_axis(self) -> int:
        """Pairs of channels of a head that turn with the position in time, and as many with the row and the column."""
        return self.head_dim // 3 // 2

    @property
    def rotary_dim(self) -> int:
        return 6 * self.pairs_of_axis

    # Fixed values for keys that the shared blocks read.

    @property
    def activation(self) -> Literal["gelu"]:
        return "gelu"


class MiniMaxM3DecoderConfig(MiniMaxM3Config):
    """The decoder."""

    family: Literal["minimax_m3"] = "minimax_m3"
    """The decoder's family."""


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", MiniMaxVisionConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", MiniMaxM3DecoderConfig, value) if isinstance(value, Mapping) else value


class MiniMaxM3VLConfig(DynamicResolutionConfig):
    """A vision transformer in front of a MiniMax-M3, as MiniMax-M3 (MiniMax, 2026) combines them."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_markers": "minimax_m3",
        "video_rule": "minimax_m3",
        "video_fps": 1.0,
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (4, 576)
    PUBLISHED_VIDEO_CELLS: ClassVar[tuple[int, int] | None] = (4, 768)
    TAKES_VIDEOS: ClassVar[bool] = True
    VIDEO_RULE: ClassVar[str] = "minimax_m3"

    vision_model: Annotated[MiniMaxVisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[MiniMaxM3DecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family minimax_m3. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 200025
    """The id that stands for an image in the text, once for each of its merged patches."""
    projection_hidden_size: PositiveInt = 6144
    """Inner width of the MLP behind the vision transformer, and of that over merged patches."""
    freeze: list[Part] = Field(default_factory=list)
    """Parts that are not trained: vision_model, vision_projection (both MLPs), language_model."""

    @property
    def projection_weights(self) -> int:
        """Weights that a merged patch is multiplied with: those of the first MLP once for each of its patches."""
        tower, inner, hidden = self.vision_model, self.projection_hidden_size, int(self.decoder.hidden_size)
        patches = tower.merged_patches
        return inner * (patches * (tower.hidden_size + hidden) + patches * hidden + hidden)


def check_minimax_m3_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, MiniMaxM3VLConfig)
    refuse_context_parallel(config)
    tower, ranks = model.vision_model, config.parallel.tensor_model_parallel_size
    check_merged_patches(tower, config)
    if not tower.pairs_of_axis:
        raise ConfigError(
            f"model.vision_model.hidden_size / model.vision_model.num_attention_heads={tower.head_dim} has to be at "
            "least 6: a pair of channels turns with each of three axes"
        )
    key = "parallel.tensor_model_parallel_size"
    must_divide(key, ranks, "model.projection_hidden_size", model.projection_hidden_size)
    check_samples(model, config)
    check_decoder(model, config)


def shrink_minimax_m3_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The image token is behind every vocabulary."""
    decoder = dict(model["language_model"])
    return {
        "vision_model": {**model["vision_model"], "patch_dim": 2},
        "language_model": {**decoder, **shrink_minimax_m3(decoder, seq_length)},
        "image_token_index": max(model["image_token_index"], 100_000),
        # As many as every small number of ranks divides.
        "projection_hidden_size": 48,
    }


# -- published size ----------------------------------------------------------------------------------

TOWER = {"num_layers": 32, "hidden_size": 1280, "num_attention_heads": 16, "ffn_hidden_size": 5120}
TEXT = {key: value for key, value in DECODERS["minimax-m3"]["model"].items() if key != "vocab_size"}
PRESETS: dict[str, dict[str, Any]] = {
    "minimax-m3-vl": {
        "model": {
            "vision_model": TOWER,
            "language_model": TEXT,
            "vocab_size": 200064,
            "image_token_index": 200025,
        },
        "data": {"seq_length": 4096},
    }
}


# -- FLOPs (counted as in mt_models.flops) -----------------------------------------------------------


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`: of a sample with one image, the largest that it can have."""
    model: Any = config.model
    length = config.data.seq_length
    text = length * flops_per_token(model.decoder, length).training
    return largest_image_flops(config, model.projection_weights) + text


MEGATRON = MegatronMap(unsupported="Megatron-Core has no attention over blocks of keys that an indexer chooses")
