"""Configuration of SmolVLM and Idefics3, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.llava.config import PixelShuffleConfig, check_parts, check_squares
from mt_models.vision.config import BASE, SO400M, siglip

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


# -- published sizes of SmolVLM and Idefics3 ---------------------------------------------------------
#
# The second version of SmolVLM has the shapes of the first but for the vocabulary of the largest.


def _preset(tower: dict[str, Any], decoder: dict[str, Any], **keys: int) -> dict[str, Any]:
    return {
        "model": {
            "vision_model": {**tower, "add_pooler": False},
            "language_model": {
                "family": "llama",
                "norm_epsilon": 1e-5,
                "untie_embeddings_and_output_weights": True,
                **decoder,
            },
            **keys,
        },
        "data": {"seq_length": 2048},
    }


def _smollm2(layers: int, hidden: int, heads: int, groups: int, ffn: int, **keys: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": 8192,
        "rotary_base": 100_000,
        **keys,
    }


LLAMA3_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "max_position_embeddings": 10240,
    "rotary_base": 500_000,
}
SMALL_TOWER = siglip(BASE, 16, 512)
LARGE_TOWER = siglip(SO400M, 14, 384)
SMALL = {"vocab_size": 49280, "image_token_index": 49190, "scale_factor": 4}

PRESETS: dict[str, dict[str, Any]] = {
    "smolvlm-256m": _preset(SMALL_TOWER, _smollm2(30, 576, 9, 3, 1536), **SMALL),
    "smolvlm-500m": _preset(SMALL_TOWER, _smollm2(32, 960, 15, 5, 2560), **SMALL),
    "smolvlm-2.2b": _preset(
        LARGE_TOWER,
        _smollm2(24, 2048, 32, 32, 8192, max_position_embeddings=16384, rotary_base=273_768),
        vocab_size=49155,
        image_token_index=49153,
        scale_factor=3,
    ),
    "smolvlm2-2.2b": _preset(
        LARGE_TOWER,
        _smollm2(24, 2048, 32, 32, 8192, rotary_base=130_000),
        vocab_size=49280,
        image_token_index=49190,
        scale_factor=3,
    ),
    "idefics3-8b": _preset(
        siglip(SO400M, 14, 364), LLAMA3_8B, vocab_size=128259, image_token_index=128257, scale_factor=2
    ),
}


MEGATRON = MegatronMap(
    unsupported="Megatron's models of images and text are made by its example scripts, in sizes that these list by "
    "name, and which id stands for an image only their tokenizer says"
)
