"""Configuration of Mistral 3 with pictures: Pixtral's vision transformer, the decoder; published sizes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.deepseek.config import flops_per_token as latent_flops_per_token
from mt_models.deepseek.config import shrink_deepseek
from mt_models.flops import flops_per_token
from mt_models.llava.config import (
    CLIP_MEAN,
    CLIP_STD,
    ProjectionActivation,
    check_decoder,
    validated,
)
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_merged_patches,
    check_samples,
    largest_image_flops,
    refuse_context_parallel,
)
from mt_models.ministral3.config import PRESETS as MINISTRALS

MISTRAL4 = "mistral4"
DECODERS = ("mistral", "ministral3", MISTRAL4)
"""Families of decoders."""


class PixtralVisionConfig(MergedPatchConfig):
    """Pixtral's vision transformer (Agrawal et al., *Pixtral 12B*, 2024): patches of images of any size, 2D rotary
    positions, RMSNorm, a gated feed-forward, no biases."""

    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    activation: Literal["swiglu", "geglu"] = "swiglu"
    """Activation of the gated feed-forward."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary wavelengths."""
    image_size: PositiveInt | None = None
    """Longest edge of images in pixels that the config.json of a converted model names, kept for other programs: the
    tower takes images of any size. Default: that of published models."""

    # Values of the shared blocks' keys that are not those of other encoders.

    @property
    def normalization(self) -> Literal["RMSNorm"]:  # type: ignore[override]
        return "RMSNorm"

    @property
    def add_bias_linear(self) -> bool:
        return False

    @property
    def add_qkv_bias(self) -> bool:
        return False


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", PixtralVisionConfig, value) if isinstance(value, Mapping) else value


class Mistral3Config(DynamicResolutionConfig):
    """Pixtral's vision transformer in front of Mistral, Ministral 3 or Mistral 4, as Mistral Small 3.1, Ministral 3 and
    Mistral Small 4 have it."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_markers": "pixtral",
        "size_rule": "longest_edge",
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (1, 3025)

    vision_model: Annotated[PixtralVisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    image_token_index: NonNegativeInt = 10
    """The id that stands for an image in the text, once for each of its merged patches."""
    projection_activation: ProjectionActivation = "gelu"
    """Between the matrices of the projection."""
    projection_bias: bool = False
    """Biases in the projection."""

    @property
    def projection_weights(self) -> int:
        tower, hidden = self.vision_model, int(self.decoder.hidden_size)
        merger = tower.hidden_size**2 * tower.merged_patches
        return merger + tower.hidden_size * hidden + hidden**2


def check_mistral3(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, Mistral3Config)
    refuse_context_parallel(config)
    if model.decoder.family not in DECODERS:
        raise ConfigError(
            f"model.language_model.family={model.decoder.family} is no decoder of model.family=mistral3; it can be "
            f"{', '.join(DECODERS)}"
        )
    check_merged_patches(model.vision_model, config)
    check_samples(model, config)
    check_decoder(model, config)


def shrink_mistral3(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The image token is behind every vocabulary."""
    decoder = dict(model["language_model"])
    latents = shrink_deepseek(decoder, seq_length) if decoder["family"] == MISTRAL4 else {}
    return {
        "vision_model": {**model["vision_model"], "patch_dim": 2},
        "language_model": {**decoder, **latents},
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- published sizes ---------------------------------------------------------------------------------

TOWER = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096}
SMALL = {
    "family": "mistral",
    "num_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 32768,
    "max_position_embeddings": 131072,
    "norm_epsilon": 1e-5,
    "rotary_base": 1000000000.0,
    "sliding_window": None,
}


def _preset(decoder: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {
            "vision_model": TOWER,
            "language_model": decoder,
            "vocab_size": 131072,
            "image_token_index": 10,
        },
        "data": {"seq_length": 4096},
    }


def _ministral(name: str) -> dict[str, Any]:
    keys = {key: value for key, value in MINISTRALS[name]["model"].items() if key != "vocab_size"}
    return _preset({"family": "ministral3", **keys})


PRESETS: dict[str, dict[str, Any]] = {
    "mistral-small-3.1-24b": _preset(SMALL),
    **{f"{name}-vl": _ministral(name) for name in MINISTRALS},
}


# -- FLOPs (counted as in mt_models.flops) -----------------------------------------------------------


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`: of a sample with one image, the largest that it can have."""
    model: Any = config.model
    length = config.data.seq_length
    of_token = latent_flops_per_token if model.decoder.family == MISTRAL4 else flops_per_token
    text = length * of_token(model.decoder, length).training
    return largest_image_flops(config, model.projection_weights) + text


MEGATRON = MegatronMap(unsupported="Megatron-Core has no vision transformer with patches of any number")
