"""Configuration of InternVL, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.llava.config import PixelShuffleConfig, ProjectionActivation, check_parts, check_squares

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MAX_NUM_TILES = 12
"""Side of an image, in the published models."""


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


# -- published sizes: InternVL3 with InternViT of 300 million parameters and Qwen 2.5 ----------------

INTERNVIT_300M = {
    "vision_model_type": "internvit",
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "img_h": 448,
    "img_w": 448,
    "patch_dim": 14,
    "activation": "gelu",
    "norm_epsilon": 1e-6,
}


def _internvl3(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    decoder = {
        "family": "qwen",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "max_position_embeddings": 32768,
        "norm_epsilon": 1e-6,
        "rotary_base": 1_000_000,
        "rope_scaling_type": "dynamic",
        "rope_scaling_factor": 2.0,
        "untie_embeddings_and_output_weights": True,
    }
    return {
        "model": {
            "vision_model": INTERNVIT_300M,
            "language_model": decoder,
            "vocab_size": 151674,
            "image_token_index": 151667,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "internvl3-1b": _internvl3(24, 896, 14, 2, 4864),
    "internvl3-2b": _internvl3(28, 1536, 12, 2, 8960),
    "internvl3-8b": _internvl3(28, 3584, 28, 4, 18944),
    "internvl3-14b": _internvl3(48, 5120, 40, 8, 13824),
}


MEGATRON = MegatronMap(
    unsupported="Megatron's models of images and text are made by its example scripts, in sizes that these list by "
    "name, and which id stands for an image only their tokenizer says"
)
