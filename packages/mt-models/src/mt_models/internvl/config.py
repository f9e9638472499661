"""Configuration of InternVL."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_models.llava.config import PixelShuffleConfig, ProjectionActivation, check_parts, check_squares

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MAX_NUM_TILES = 12
"""Of an image, in the published models."""


class InternVLConfig(PixelShuffleConfig):
    """An InternViT tower, squares of its patches, a norm and two matrices, a decoder (Chen et al., *How Far Are We to
    GPT-4V?*, 2024; InternVL3: Zhu et al., 2025)."""

    projection_activation: ProjectionActivation = "gelu"
    """Between the matrices of the projection."""

    @property
    def projection_weights(self) -> int:
        hidden = self.decoder.hidden_size
        return int(self.feature_width * hidden + hidden**2)

    @property
    def image_data_keys(self) -> dict[str, Any]:
        """Tiles in the grid nearest to the image's proportions, and the whole image."""
        return super().image_data_keys | {
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
            "max_num_tiles": MAX_NUM_TILES,
            "use_thumbnail": True,
            "resize": "squash",
            "image_markers": "internvl",
        }


def check_internvl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, InternVLConfig)
    check_squares(model.vision_model, model.scale_factor)
    check_parts(model, config)
