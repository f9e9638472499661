"""Configuration of Kimi K2.5 with pictures: MoonViT, its decoder, how the two meet; published sizes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.deepseek.config import PRESETS as DECODERS
from mt_models.deepseek.config import DeepseekConfig, flops_per_token, shrink_deepseek
from mt_models.llava.config import check_decoder, validated
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_merged_patches,
    check_samples,
    largest_image_flops,
    refuse_context_parallel,
)


class MoonVitConfig(MergedPatchConfig):
    """MoonViT (Kimi Team, *Kimi-VL Technical Report*, 2025): patches of images of any size, learned positions
    resampled to the image, rotary positions of rows and columns, LayerNorm, attention among all patches of an image."""

    num_position_embeddings: PositiveInt = 4096
    """Learned positions, of a square that is resampled to the patches of an image."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary wavelengths."""

    @property
    def position_side(self) -> int:
        """Side of the square of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    # Fixed values for keys that the shared blocks read.

    @property
    def temporal_patch_size(self) -> int:
        """Frames of a view of a video at most, whose patches see one another and whose states are averaged."""
        return 4

    @property
    def activation(self) -> Literal["gelu_tanh"]:
        return "gelu_tanh"

    @property
    def rotary_interleaved(self) -> bool:
        return True


class KimiDecoderConfig(DeepseekConfig):
    """DeepSeek-V3 of Kimi K2's sizes."""

    family: Literal["deepseek"] = "deepseek"
    """The decoder's family."""


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", MoonVitConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", KimiDecoderConfig, value) if isinstance(value, Mapping) else value


class KimiK25Config(DynamicResolutionConfig):
    """MoonViT in front of a DeepSeek-V3, as Kimi K2.5 (Moonshot AI, 2026) combines them."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_markers": "kimi",
        "size_rule": "padded",
        "video_rule": "kimi_k25",
        "min_video_frames": 1,
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (1, 4096)
    PUBLISHED_VIDEO_CELLS: ClassVar[tuple[int, int] | None] = (1, 1024)
    TAKES_VIDEOS: ClassVar[bool] = True
    VIDEO_RULE: ClassVar[str] = "kimi_k25"

    vision_model: Annotated[MoonVitConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[KimiDecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family deepseek. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 163605
    """The id that stands for an image in the text, once for each of its merged patches."""
    video_token_index: NonNegativeInt = 163840
    """An id that is embedded as token 0. Views of videos have image_token_index."""
    projection_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the variance in the norm in front of the projection."""

    @property
    def decoder(self) -> Any:
        """With the token of videos, which no video replaces."""
        return super().decoder.model_copy(update={"placeholder_token_ids": [self.video_token_index]})

    @property
    def projection_weights(self) -> int:
        joined = self.vision_model.hidden_size * self.vision_model.merged_patches
        return joined**2 + joined * int(self.decoder.hidden_size)


def check_kimi_k25(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, KimiK25Config)
    refuse_context_parallel(config)
    tower = model.vision_model
    if tower.position_side**2 != tower.num_position_embeddings:
        raise ConfigError(
            f"model.vision_model.num_position_embeddings={tower.num_position_embeddings} is no square; learned "
            f"positions are those of one, such as {tower.position_side**2}"
        )
    if (depths := model.language_model.mtp_num_layers) > 0:
        raise ConfigError(
            f"model.language_model.mtp_num_layers={depths} would embed the tokens of images as words; "
            "model.family=kimi_k25 has no layers of multi-token prediction, set it to 0"
        )
    check_merged_patches(tower, config)
    check_samples(model, config)
    check_decoder(model, config)


def shrink_kimi_k25(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The image token is behind every vocabulary."""
    decoder = dict(model["language_model"])
    return {
        "vision_model": {**model["vision_model"], "patch_dim": 2, "num_position_embeddings": 25},
        "language_model": {**decoder, **shrink_deepseek(decoder, seq_length)},
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- published sizes ---------------------------------------------------------------------------------

TOWER = {"num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304}
TEXT = {key: value for key, value in DECODERS["kimi-k2-thinking"]["model"].items() if key != "vocab_size"}
PRESETS: dict[str, dict[str, Any]] = {
    "kimi-k2.5": {
        "model": {
            "vision_model": TOWER,
            "language_model": TEXT,
            "vocab_size": 163840,
            "image_token_index": 163605,
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


MEGATRON = MegatronMap(unsupported="Megatron-Core has no vision transformer with rotary positions of rows and columns")
