"""Shapes of the image towers of CLIP and SigLIP, as published. They name no data: images come in the tower's size."""

from __future__ import annotations

from typing import Any

LARGE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
BASE = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
SO400M = {"num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304}


def clip(shape: dict[str, int], patch: int, image: int) -> dict[str, Any]:
    """Keys of a CLIP tower."""
    return {"vision_model_type": "clip", **shape, "patch_dim": patch, "img_h": image, "img_w": image}


def siglip(shape: dict[str, int], patch: int, image: int) -> dict[str, Any]:
    """Keys of a SigLIP tower."""
    return {
        "vision_model_type": "siglip",
        **shape,
        "patch_dim": patch,
        "img_h": image,
        "img_w": image,
        "activation": "gelu_tanh",
        "norm_epsilon": 1e-6,
    }


CLIP_LARGE_336 = clip(LARGE, 14, 336)
"""The tower of LLaVA 1.5."""


def _preset(tower: dict[str, Any]) -> dict[str, Any]:
    return {"model": tower}


PRESETS: dict[str, dict[str, Any]] = {
    "clip-vit-base-patch32": _preset(clip(BASE, 32, 224)),
    "clip-vit-base-patch16": _preset(clip(BASE, 16, 224)),
    "clip-vit-large-patch14": _preset(clip(LARGE, 14, 224)),
    "clip-vit-large-patch14-336": _preset(CLIP_LARGE_336),
    "siglip-base-patch16-224": _preset(siglip(BASE, 16, 224)),
    "siglip-base-patch16-256": _preset(siglip(BASE, 16, 256)),
    "siglip-base-patch16-384": _preset(siglip(BASE, 16, 384)),
    "siglip-base-patch16-512": _preset(siglip(BASE, 16, 512)),
    "siglip-so400m-patch14-224": _preset(siglip(SO400M, 14, 224)),
    "siglip-so400m-patch14-384": _preset(siglip(SO400M, 14, 384)),
}
