"""A small SmolVLM for checks: images of few patches. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from mt_models.llava.shrink import shrink_images


def shrink_smolvlm(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """A feature of two by two patches, where these fill the image."""
    shrunk = shrink_images(model)
    tower = shrunk["vision_model"]
    rows, columns = tower["img_h"] // tower["patch_dim"], tower["img_w"] // tower["patch_dim"]
    return {**shrunk, "scale_factor": gcd(rows, columns, 2)}
