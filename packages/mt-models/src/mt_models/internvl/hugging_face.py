"""InternVL in Hugging Face's format, `internvl`, as its files whose names end with `-hf` have it.

Names are LLaVA's, with other ones within the tower (`vision_tower.`) and a norm in the projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.internvl.config import InternVLConfig
from mt_models.llava import hugging_face as llava
from mt_models.llava.image_processor import read_processor, require_size, trained_keys, written_processor
from mt_models.vision import internvit_hugging_face as internvit
from mt_models.vision.hugging_face import with_bias

# -- configuration -----------------------------------------------------------------------------------


def import_side(ratio: float) -> int:
    """Of the square that becomes one feature, as the class rounds it."""
    return int(1 / ratio)


def export_side(side: int) -> float:
    """Raises ConfigError for a ratio that the class cannot divide by."""
    # 1 / side is exact in binary for powers of 2 alone: int(1 / ratio) of another could round to side - 1.
    if side & (side - 1):
        raise ConfigError(
            f"model.scale_factor={side} cannot be written as downsample_ratio of a Hugging Face internvl; it can be a "
            "power of 2"
        )
    return 1 / side


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of tower and decoder, and the vocabulary, which is the whole model's."""
    tower = {"model_type": internvit.MODEL_TYPE, **(external.get("vision_config") or {})}
    require_known("vision_config.model_type", str(tower["model_type"]), [internvit.MODEL_TYPE])
    text = {"model_type": "qwen2", **(external.get("text_config") or {})}
    return {
        "vision_model": internvit.TOWER.import_value(tower),
        **llava.import_decoder({**external, "text_config": text}),
    }


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for another tower."""
    config = InternVLConfig.model_validate(model)
    if config.vision_model.vision_model_type != "internvit":
        raise ConfigError(
            f"model.vision_model.vision_model_type={config.vision_model.vision_model_type} cannot be written as the "
            "tower of a Hugging Face internvl; it can be internvit"
        )
    tower = internvit.TOWER.export_value(config.vision_model.model_dump())
    return {
        "vision_config": {"model_type": internvit.MODEL_TYPE, **tower},
        **llava.export_decoder(config),
        "image_seq_length": config.image_seq_length,
    }


INTERNVL = ConfigMap(
    architecture="internvl",
    fields=(
        Field("image_token_id", "image_token_index", default=151667),
        Field("downsample_ratio", "scale_factor", import_side, export_side, default=0.5),
        Field(
            "projector_hidden_act",
            "projection_activation",
            llava.import_activation,
            llava.export_activation,
            default="gelu",
        ),
    ),
    fixed=(
        Fixed("vision_feature_layer", (-1,)),
        Fixed("vision_feature_select_strategy", ("default",)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "image_seq_length": "counted from the tower's patches",
        "vocab_size": "text_config has it",
    },
    import_extra=import_parts,
    import_extra_keys=("vision_config", "text_config", "tie_word_embeddings"),
    export_extra=export_parts,
)

# -- names -------------------------------------------------------------------------------------------

PROJECTION = (
    ("input_layernorm", "layer_norm"),
    ("encoder.linear_fc1", "linear_1"),
    ("encoder.linear_fc2", "linear_2"),
)
OUTPUT = llava.DECODER + llava.OUTPUT


def name_map(config: InternVLConfig) -> NameMap:
    tower = internvit.tower_map(config.vision_model)
    decoder = llava.decoder_map(config, llava.DECODER + llava.STEM, OUTPUT)
    projection: list[Rule] = []
    for ours, theirs in PROJECTION:
        projection += with_bias(f"vision_projection.{ours}", f"{llava.PROJECTION}{theirs}")
    rules = [*llava.prefixed(tower.rules, theirs=llava.TOWER), *projection, *decoder.rules]
    return NameMap(rules, 0, ignored=decoder.ignored)


def copies(config: InternVLConfig) -> Mapping[str, str]:
    return llava.tied_output(config, name_map(config), OUTPUT)


def spelling(config: InternVLConfig, name: str) -> str:
    """The published name, from that of transformers 5 and of the decoder as a single model."""
    return llava.published_spelling(name)


# -- images ------------------------------------------------------------------------------------------


def write_preprocessor(config: InternVLConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    keys = trained_keys(config, data, {"max_num_tiles": 1})
    return {
        **written_processor("GotOcr2ImageProcessor", "InternVLProcessor", keys),
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": keys["max_num_tiles"],
        "size": {"height": keys["img_h"], "width": keys["img_w"]},
    }


def read_preprocessor(config: InternVLConfig, external: Mapping[str, Any]) -> dict[str, Any]:
    """crop_to_patches is not read: InternVLProcessor cuts images whatever a file has there.

    Raises ConfigError for tiles of another size than the tower's, and for a least number of them.
    """
    keys = read_processor(config, external, {"min_patches": 1})
    require_size(config, "size", external.get("size"))
    return keys | {"max_num_tiles": external.get("max_patches") or keys["max_num_tiles"]}


HUGGING_FACE = HuggingFaceFamily(
    "internvl",
    {"internvl": INTERNVL},
    name_map,
    copies=copies,
    spelling=spelling,
    architectures={"internvl": "InternVLForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
)
