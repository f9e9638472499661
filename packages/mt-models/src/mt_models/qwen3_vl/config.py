"""Configuration of Qwen3-VL: its vision transformer, its decoder, how the two meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.llava.config import check_decoder, decoder_training_flops, validated
from mt_models.llava.dynamic_config import (
    DynamicResolutionConfig,
    MergedPatchConfig,
    check_merged_patches,
    check_samples,
    image_flops,
    largest_image,
    largest_image_flops,
    refuse_context_parallel,
)
from mt_models.qwen.config import QwenConfig


class Qwen3VisionConfig(MergedPatchConfig):
    """The vision transformer of Qwen3-VL (Technical Report, 2025): patches of images of any size, learned positions
    resampled to the image, 2D rotary positions, LayerNorm, attention among all patches of an image."""

    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the variance."""
    patch_dim: PositiveInt = 16
    """Side of a patch in pixels."""
    temporal_patch_size: PositiveInt = 2
    """Frames of a patch. A still image is a film in which all frames are equal."""
    num_position_embeddings: PositiveInt = 2304
    """Learned positions, of a square that is resampled to the patches of an image."""
    deepstack_layers: list[NonNegativeInt] = Field(default_factory=lambda: [8, 16, 24])
    """Layers, counted from 0, whose outputs are merged too: the n-th of them is added behind layer n of the decoder."""

    @property
    def position_side(self) -> int:
        """Side of the square of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    # Fixed values for keys that the shared blocks read.

    @property
    def activation(self) -> Literal["gelu_tanh"]:
        return "gelu_tanh"


class Qwen3VLDecoderConfig(QwenConfig):
    """Qwen3, dense or with experts, with multimodal rotary positions whose axes take turns."""

    family: Literal["qwen"] = "qwen"
    """The decoder's family."""
    kv_channels: PositiveInt | None = 128
    """Size of a head. null: hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 262144
    """Positions that the model was trained for. With rope scaling more of them can be used."""
    rotary_base: Annotated[float, Field(gt=0)] = 5000000.0
    """Base of the rotary wavelengths."""
    mrope_section: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] = Field(
        default_factory=lambda: [24, 20, 20]
    )
    """Pairs of channels of a head that are turned by the position in time, height and width; half of a head together.
    Height and width take every third pair, beginning with the second and the third."""


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", Qwen3VisionConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", Qwen3VLDecoderConfig, value) if isinstance(value, Mapping) else value


class Qwen3VLConfig(DynamicResolutionConfig):
    """A vision transformer in front of a Qwen3 decoder, as Qwen3-VL combines them."""

    PUBLISHED_IMAGES: ClassVar[dict[str, Any]] = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_markers": "qwen2_vl",
    }
    PUBLISHED_CELLS: ClassVar[tuple[int, int]] = (64, 16384)
    TAKES_VIDEOS: ClassVar[bool] = True

    vision_model: Annotated[Qwen3VisionConfig, BeforeValidator(vision_section)]  # type: ignore[assignment]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[Qwen3VLDecoderConfig, BeforeValidator(decoder_section)]
    """A table with the keys of the family qwen, and mrope_section. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 151655
    """The id that stands for an image in the text, once for each of its merged patches."""


def check_qwen3_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, Qwen3VLConfig)
    refuse_context_parallel(config)
    check_tower(model.vision_model, config)
    check_sections(model.language_model.mrope_section, model.language_model)
    check_deepstack(model, config)
    check_samples(model, config)
    check_decoder(model, config)


def check_tower(tower: Qwen3VisionConfig, config: Config) -> None:
    section = "model.vision_model"
    if tower.position_side**2 != tower.num_position_embeddings:
        raise ConfigError(
            f"{section}.num_position_embeddings={tower.num_position_embeddings} is no square; learned positions are "
            f"those of one, such as {tower.position_side**2}"
        )
    if beyond := [layer for layer in tower.deepstack_layers if layer >= tower.num_layers]:
        raise ConfigError(
            f"{section}.deepstack_layers={tower.deepstack_layers} has {beyond[0]}, and layers go from 0 to "
            f"{tower.num_layers - 1}"
        )
    if sorted(set(tower.deepstack_layers)) != tower.deepstack_layers:
        raise ConfigError(f"{section}.deepstack_layers={tower.deepstack_layers} have to be in order, each once")
    check_merged_patches(tower, config)


def check_sections(sections: list[int], decoder: Any) -> None:
    """Raise ConfigError for axes that do not share the rotated pairs of a head among them."""
    pairs = decoder.rotary_dim // 2
    if sum(sections) != pairs:
        raise ConfigError(
            f"model.language_model.mrope_section={sections} has {sum(sections)} pairs of channels, and a head has "
            f"{pairs}; they have to be as many"
        )
    if max(3 * sections[1] - 1, 3 * sections[2]) > pairs:
        raise ConfigError(
            f"model.language_model.mrope_section={sections}: height and width take every third of {pairs} pairs of "
            f"channels, which are at most {(pairs + 1) // 3} and {pairs // 3}"
        )
    if decoder.rope_scaling_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"model.language_model.rope_scaling_type={decoder.rope_scaling_type} scales by the length of a text, which "
            "positions of images do not count; use yarn or linear"
        )


def check_deepstack(model: Qwen3VLConfig, config: Config) -> None:
    """Raise ConfigError for features that are added to layers behind the first pipeline stage."""
    count, layers = len(model.vision_model.deepstack_layers), model.language_model.num_layers
    if count > layers:
        raise ConfigError(
            f"model.vision_model.deepstack_layers has {count} layers, and the decoder {layers}; each is added behind "
            "one of its first layers"
        )
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    if stages > 1 and layers // stages < count:
        raise ConfigError(
            f"{stages} pipeline stages of {layers} layers have {layers // stages} each, and model.vision_model."
            f"deepstack_layers adds features behind the first {count}, which have to be in the first stage; use fewer "
            "stages"
        )


def shrink_qwen3_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The image token is behind every vocabulary."""
    tower, decoder = dict(model["vision_model"]), dict(model["language_model"])
    tower |= {"patch_dim": 2, "num_position_embeddings": 25, "deepstack_layers": [0]}
    decoder["kv_channels"] = heads = decoder["hidden_size"] // decoder["num_attention_heads"]
    third = heads // 2 // 3
    decoder["mrope_section"] = [heads // 2 - 2 * third, third, third]
    return {
        "vision_model": tower,
        "language_model": decoder,
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- published sizes ---------------------------------------------------------------------------------

BASE = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "ffn_hidden_size": 4096,
    "deepstack_layers": [5, 11, 17],
}
LARGE = {"num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304}


def _qwen3_vl(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vision: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    decoder = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        **keys,
    }
    return {
        "model": {
            "vision_model": vision,
            "language_model": decoder,
            "vocab_size": 151936,
            "image_token_index": 151655,
        },
        "data": {"seq_length": 4096},
    }


def _sparse(layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    moe = {
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": expert_ffn,
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],
    }
    return _qwen3_vl(layers, hidden, heads, 4, ffn, LARGE, moe=moe)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": _qwen3_vl(28, 2048, 16, 8, 6144, BASE, untie_embeddings_and_output_weights=False),
    "qwen3-vl-4b": _qwen3_vl(36, 2560, 32, 8, 9728, BASE, untie_embeddings_and_output_weights=False),
    "qwen3-vl-8b": _qwen3_vl(36, 4096, 32, 8, 12288, LARGE),
    "qwen3-vl-32b": _qwen3_vl(64, 5120, 64, 8, 25600, LARGE),
    "qwen3-vl-30b-a3b": _sparse(48, 2048, 32, 6144, 768),
    "qwen3-vl-235b-a22b": _sparse(94, 4096, 64, 12288, 1536),
}


# -- FLOPs (counted as in mt_models.flops) -----------------------------------------------------------


def merger_weights(model: Any) -> int:
    """Elements of the matrices of the patch mergers: that of the last state and those of deepstack layers."""
    tower = model.vision_model
    joined = tower.hidden_size * tower.merged_patches
    return int((1 + len(tower.deepstack_layers)) * joined * (joined + model.decoder.hidden_size))


def training_flops(config: Config) -> float | None:
    """See `ModelSpec.training_flops`: of a sample with one image, the largest that it can have."""
    model: Any = config.model
    decoder = decoder_training_flops(config)
    if decoder is None:
        return None
    # Patches of a still image are embedded once; largest_image_flops counts one frame of those of a video.
    further_frames = getattr(config.data, "frames_per_view", 1) - 1
    embedded = 3 * further_frames * image_flops(model.vision_model, largest_image(config)).patches
    return largest_image_flops(config, merger_weights(model)) + embedded + decoder


MEGATRON = MegatronMap(
    unsupported="Megatron-Core has no vision transformer with rotary positions whose states reach layers of the decoder"
)
