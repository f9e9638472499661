"""Configuration that families with images of any size share: towers of merged patches, and samples made for them."""

from __future__ import annotations

from typing import Any, ClassVar

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import EncoderConfig
from mt_models.flops import core_flops, dense_feed_forward_flops, projection_flops
from mt_models.llava.config import VisionLanguageConfig, require_data
from mt_models.vision.config import ImageFlops, check_tensor_parallel


class MergedPatchConfig(EncoderConfig):
    """A vision transformer over the patches of images of any size, with 2D rotary positions; squares of patches become
    one vector of the decoder."""

    patch_dim: PositiveInt = 14
    """Side of a patch in pixels."""
    spatial_merge_size: PositiveInt = 2
    """So many by so many patches become one vector of the decoder."""
    num_channels: PositiveInt = 3
    """Colours of a pixel."""

    @property
    def merged_side(self) -> int:
        """Pixels of what one vector of the decoder stands for."""
        return self.patch_dim * self.spatial_merge_size

    @property
    def merged_patches(self) -> int:
        return self.spatial_merge_size**2

    # Fixed values for keys that the shared blocks read.

    @property
    def attention_dropout(self) -> float:
        return 0.0

    @property
    def hidden_dropout(self) -> float:
        return 0.0


class DynamicResolutionConfig(VisionLanguageConfig):
    """Images in their own proportions, of whole cells (merged patches), each of which is one vector of the decoder."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]]
    """Keys of the data set image_text beside sizes, for images as published models of the family take them."""
    PUBLISHED_CELLS: ClassVar[tuple[int, int]]
    """Fewest and most cells of an image there."""
    PUBLISHED_VIDEO_CELLS: ClassVar[tuple[int, int] | None] = None
    """Fewest and most cells of a frame of a video there; None: as the data set has them."""
    TAKES_VIDEOS: ClassVar[bool] = False
    """Whether cells can be those of two frames of a video."""
    VIDEO_RULE: ClassVar[str] = "qwen3_vl"
    """How a video is put into a text, where the family takes some: data.video_rule."""

    @property
    def image_seq_length(self) -> int:
        """Positions that a merged patch takes in the text."""
        return 1

    @property
    def image_data_keys(self) -> dict[str, Any]:
        # A MergedPatchConfig in all of these families.
        side: int = self.vision_model.merged_side  # type: ignore[attr-defined]
        fewest, most = self.PUBLISHED_CELLS
        return {
            "img_h": side,
            "img_w": side,
            "image_token_index": self.image_token_index,
            "image_seq_length": self.image_seq_length,
            "resample": "bicubic",
            "dynamic_resolution": True,
            "min_pixels": fewest * side**2,
            "max_pixels": most * side**2,
            **self.PUBLISHED_IMAGES,
            **self._video_keys(side),
        }

    def _video_keys(self, side: int) -> dict[str, Any]:
        if self.PUBLISHED_VIDEO_CELLS is None:
            return {}
        fewest, most = self.PUBLISHED_VIDEO_CELLS
        return {"min_video_pixels": fewest * side**2, "max_video_pixels": most * side**2}


def refuse_context_parallel(config: Config) -> None:
    """Raise ConfigError for sequences that are divided between the layers."""
    if (size := config.parallel.context_parallel_size) > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={size} divides sequences, and model.family={config.model.family} puts the "
            "features of an image at any place of a whole one; set it to 1, and use parallel.sequence_parallel for "
            "long sequences"
        )


def check_merged_patches(tower: MergedPatchConfig, config: Config) -> None:
    """Raise ConfigError for heads that cannot be rotated by rows and columns, or be shared by the ranks."""
    section = "model.vision_model"
    must_divide(
        f"{section}.num_attention_heads", tower.num_attention_heads, f"{section}.hidden_size", tower.hidden_size
    )
    if tower.head_dim % 4:
        raise ConfigError(
            f"{section}.hidden_size / {section}.num_attention_heads={tower.head_dim} has to be a multiple of 4: rotary "
            "positions turn one half of the pairs of channels by the row and the other by the column of a patch"
        )
    check_tensor_parallel(tower, config, section)


def check_samples(model: Any, config: Config) -> None:
    """Raise ConfigError for samples without cells of the size that the tower of `model` takes."""
    side = model.vision_model.merged_side
    require_data(
        config,
        {
            "image_token_index": (model.image_token_index, "model.image_token_index"),
            "dynamic_resolution": (True, f"since model.family={model.family} takes images in their own proportions"),
            "image_seq_length": (1, "the positions of a merged patch"),
            "img_h": (side, "the side in pixels of patches that are merged"),
            "img_w": (side, "the side in pixels of patches that are merged"),
            "num_channels": (model.vision_model.num_channels, "model.vision_model.num_channels"),
        },
    )
    if (frames := getattr(config.data, "frames_per_view", 1)) > 1:
        if model.TAKES_VIDEOS:
            require_data(config, {"video_rule": (model.VIDEO_RULE, f"that of model.family={model.family}")})
        taken = getattr(model.vision_model, "temporal_patch_size", 1) if model.TAKES_VIDEOS else 1
        if frames != taken:
            raise ConfigError(
                f"data.frames_per_view={frames} has to be 1: model.family={model.family} with these keys takes no "
                "videos"
            )


def largest_image(config: Config) -> int:
    """Cells of the largest image that a sample can have; 0 for samples of text alone."""
    data: Any = config.data
    return int(data.most_cells) if getattr(data, "dynamic_resolution", False) else 0


def image_flops(config: MergedPatchConfig, cells: int) -> ImageFlops:
    """Forward FLOPs of an image of so many cells, in which all patches see one another."""
    patches = cells * config.merged_patches
    layer: Any = config  # Each tower has an activation, some as a key and some as a fixed value.
    return ImageFlops(
        patches=2 * patches * config.num_channels * config.patch_dim**2 * config.hidden_size,
        attention_projections=config.num_layers * patches * projection_flops(layer),
        attention_core=config.num_layers * patches * core_flops(layer, patches),
        feed_forward=config.num_layers * patches * dense_feed_forward_flops(layer),
        pooler=0.0,
        output=0.0,
    )


def largest_image_flops(config: Config, projection_weights: int) -> float:
    """FLOPs of training on the largest image that a sample can have: the tower, and the projection of each cell."""
    model: Any = config.model
    cells = largest_image(config)
    return image_flops(model.vision_model, cells).training + 3 * 2.0 * cells * projection_weights
