"""A small LLaVA for checks: images of few patches. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shrink_llava(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """The last state of the tower is projected."""
    return {**shrink_images(model), "vision_feature_layers": [-1]}


def shrink_images(model: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model] for two by two patches, or as near as the proportions of the image allow. The image token is
    behind every vocabulary."""
    tower = model["vision_model"]
    return {
        "vision_model": {**tower, "patch_dim": max(1, min(tower["img_h"], tower["img_w"]) // 2)},
        "image_token_index": max(model["image_token_index"], 100_000),
    }
