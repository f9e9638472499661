"""Configuration of SmolVLM and Idefics3."""

from __future__ import annotations

from typing import Any

from mt_core.config.checks import must_divide
from mt_core.config.schema import Config, PositiveInt
from mt_core.errors import ConfigError
from mt_models.llava.config import PixelShuffleConfig, check_parts, check_squares

TILES_OF_EDGE = 4
"""Tiles along the longer side of an image, in the published models."""


class SmolVLMConfig(PixelShuffleConfig):
    """A SigLIP tower, squares of its patches, one matrix, a decoder (Idefics3: Laurençon et al., 2024; SmolVLM:
    Marafioti et al., 2025)."""

    scale_factor: PositiveInt = 4
    """Side of the square of patches that becomes one feature."""

    @property
    def projection_weights(self) -> int:
        return int(self.feature_width * self.decoder.hidden_size)

    @property
    def image_data_keys(self) -> dict[str, Any]:
        """Tiles, with markers of their row and column, and the whole image."""
        return super().image_data_keys | {
            "image_longest_edge": TILES_OF_EDGE * self.vision_model.img_h,
            "image_markers": "idefics3",
            "resample": "lanczos",
        }


def check_smolvlm(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, SmolVLMConfig)
    if model.vision_model.has_class_token:
        raise ConfigError(
            f"model.vision_model.vision_model_type={model.vision_model.vision_model_type} has a class token, and "
            'model.family=smolvlm makes features of patches alone; set it to "siglip"'
        )
    check_squares(model.vision_model, model.scale_factor)
    check_parts(model, config)
    tensor_parallel = config.parallel.tensor_model_parallel_size
    width = model.decoder.hidden_size
    must_divide("parallel.tensor_model_parallel_size", tensor_parallel, "model.language_model.hidden_size", width)
