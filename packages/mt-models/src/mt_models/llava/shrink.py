"""Small models of images and text for checks: images of few patches. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any


def shrink_llava(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """The last state of the tower is projected."""
    return {**shrink_images(model), "vision_feature_layers": [-1]}


def shrink_squares(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Of a family whose features are squares of patches: of two by two, where these fill the image."""
    shrunk = shrink_images(model)
    tower = shrunk["vision_model"]
    rows, columns = tower["img_h"] // tower["patch_dim"], tower["img_w"] // tower["patch_dim"]
    return {**shrunk, "scale_factor": gcd(rows, columns, 2)}


def shrink_images(model: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model] for two by two patches, or as near as the proportions of the image allow. The image token is
    behind every vocabulary."""
    tower = model["vision_model"]
    return {
        "vision_model": {**tower, "patch_dim": max(1, min(tower["img_h"], tower["img_w"]) // 2)},
        "image_token_index": max(model["image_token_index"], 100_000),
    }
