"""Configuration of Qwen3.5 and 3.6 with pictures, and their published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mt_core.config.fields import NonNegativeInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.llava.config import check_decoder, validated
from mt_models.llava.dynamic_config import check_samples, refuse_context_parallel
from mt_models.qwen3_vl.config import Qwen3VisionConfig, Qwen3VLConfig, check_sections, check_tower
from mt_models.qwen_next.config import SMALL, QwenNextConfig
from mt_models.qwen_next.presets import PRESETS as DECODERS


class QwenNextVisionConfig(Qwen3VisionConfig):
    """The vision transformer of Qwen3-VL, of which the last state alone is used."""

    deepstack_layers: Annotated[list[NonNegativeInt], Field(max_length=0)] = Field(default_factory=list)
    """None: no state of a middle layer reaches the decoder."""


class QwenNextVLDecoderConfig(QwenNextConfig):
    """Qwen3.5 and 3.6 with multimodal rotary positions whose axes take turns."""

    family: Literal["qwen_next"] = "qwen_next"
    """The decoder's family."""
    generation: Literal["qwen3_5"] = "qwen3_5"
    """Whose names Hugging Face files have."""
    mrope_section: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] = Field(
        default_factory=lambda: [11, 11, 10]
    )
    """Pairs of rotated channels of a head that are turned by the position in time, height and width, together all.
    Height and width take every third pair, beginning with the second and the third."""


def vision_section(value: Any) -> Any:
    return validated("model.vision_model", QwenNextVisionConfig, value) if isinstance(value, Mapping) else value


def decoder_section(value: Any) -> Any:
    return validated("model.language_model", QwenNextVLDecoderConfig, value) if isinstance(value, Mapping) else value


class QwenNextVLConfig(Qwen3VLConfig):
    """A vision transformer in front of a decoder of gated delta nets and attention."""

    vision_model: Annotated[QwenNextVisionConfig, BeforeValidator(vision_section)]
    """A table with the keys of the vision transformer."""
    language_model: Annotated[QwenNextVLDecoderConfig, BeforeValidator(decoder_section)]  # type: ignore[assignment]
    """A table with the keys of the family qwen_next, and mrope_section. The vocabulary is model.vocab_size."""
    image_token_index: NonNegativeInt = 248056
    """The id that stands for an image in the text, once for each of its merged patches."""

    @property
    def mtp_num_layers(self) -> int:
        """Those of the decoder, for layouts of pipeline stages."""
        return self.language_model.mtp_num_layers


def check_qwen_next_vl(config: Config) -> None:
    """Raise ConfigError for parts that cannot be built or do not fit together, or samples made for another model."""
    model = config.model
    assert isinstance(model, QwenNextVLConfig)
    refuse_context_parallel(config)
    check_tower(model.vision_model, config)
    check_sections(model.language_model.mrope_section, model.language_model)
    check_samples(model, config)
    check_decoder(model, config)


def shrink_qwen_next_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`. The image token is behind every vocabulary."""
    tower, decoder = dict(model["vision_model"]), {**model["language_model"], **SMALL}
    tower |= {"patch_dim": 2, "num_position_embeddings": 25}
    heads = decoder.get("kv_channels") or decoder["hidden_size"] // decoder["num_attention_heads"]
    pairs = int(heads * decoder["rotary_percent"]) // 2
    decoder["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {
        "vision_model": tower,
        "language_model": decoder,
        "image_token_index": max(model["image_token_index"], 100_000),
    }


# -- published sizes ---------------------------------------------------------------------------------

TINY_TOWER = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 3072}
SMALL_TOWER = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096}
TOWER = {"num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304}
TOWERS = {"qwen3.5-0.8b": TINY_TOWER, "qwen3.5-2b": SMALL_TOWER, "qwen3.5-4b": SMALL_TOWER}
"""Towers of the smaller sizes; all others have TOWER."""


def _with_tower(name: str) -> dict[str, Any]:
    decoder = {key: value for key, value in DECODERS[name]["model"].items() if key != "vocab_size"}
    return {
        "model": {
            "vision_model": TOWERS.get(name, TOWER),
            "language_model": decoder,
            "vocab_size": DECODERS[name]["model"]["vocab_size"],
            "image_token_index": 248056,
        },
        "data": DECODERS[name]["data"],
    }


PRESETS: dict[str, dict[str, Any]] = {
    f"{name}-vl": _with_tower(name) for name in DECODERS if not name.startswith("qwen3-next")
}

MEGATRON = MegatronMap(
    unsupported="Megatron's arguments of gated delta nets (experimental_attention_variant) are not written, and "
    "Megatron-Core has no vision transformer with rotary positions"
)
