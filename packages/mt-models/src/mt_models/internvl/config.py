"""Configuration of InternVL."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config, PositiveInt
from mt_models.llava.config import ProjectionActivation, VisionLanguageConfig, check_parts, check_squares

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MAX_NUM_TILES = 12
"""Of an image, in the published models."""


class InternVLConfig(VisionLanguageConfig):
    """An InternViT tower, squares of its patches, a norm and two matrices, a decoder (Chen et al., *How Far Are We to
    GPT-4V?*, 2024; InternVL3: Zhu et al., 2025)."""

    scale_factor: PositiveInt = 2
    """Side of the square of patches that becomes one feature."""
    projection_activation: ProjectionActivation = "gelu"
    """Between the matrices of the projection."""

    @property
    def image_seq_length(self) -> int:
        return self.vision_model.num_patches // self.scale_factor**2

    @property
    def feature_width(self) -> int:
        """Of what the projection reads."""
        return self.vision_model.hidden_size * self.scale_factor**2

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
