"""InternVL in Hugging Face's format, `internvl`, as its files whose names end with `-hf` have it.

Names are LLaVA's, with other ones within the tower (`vision_tower.`) and a norm in the projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.internvl.config import InternVLConfig
from mt_models.llava import hugging_face as llava
from mt_models.llava.image_processor import read_processor, require_size, trained_keys, written_processor
from mt_models.vision.config import VisionEncoderConfig
from mt_models.vision.hugging_face import (
    OUR_LAYER,
    OURS,
    SIZES,
    TOWER_IGNORED,
    export_sizes,
    import_sizes,
    layer_rules,
    tower_fields,
    with_bias,
)

# -- InternViT, `internvl_vision`: a part of `internvl` alone ----------------------------------------
#
# The tower of 300 million parameters. That of 6 billion has norms of whole queries and keys, and is refused by name.

MODEL_TYPE = "internvl_vision"

# -- configuration -----------------------------------------------------------------------------------

DEFAULTS = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
"""Where the class's defaults are not those of SigLIP."""


def import_tower(external: Mapping[str, Any]) -> dict[str, Any]:
    # The class's default is no bias, which the layers here always have.
    if not external.get("attention_bias", False):
        raise ConfigError("vision_config.attention_bias=False is not supported; it can be True")
    sizes = {"image_size": external.get("image_size", 448), "patch_size": external.get("patch_size", 14)}
    return {"vision_model_type": "internvit", "use_scaled_init_method": False, **import_sizes(sizes, patch=14)}


def export_tower(model: Mapping[str, Any]) -> dict[str, Any]:
    sizes = export_sizes(model)
    pairs = {key: [sizes[key], sizes[key]] for key in SIZES}
    return {**sizes, **pairs, "attention_bias": True}


TOWER = ConfigMap(
    architecture=MODEL_TYPE,
    fields=(
        *(
            replace(field, default=DEFAULTS.get(field.theirs, field.default))
            for field in tower_fields(activation="gelu", epsilon=1e-6)
        ),
        Field("layer_scale_init_value", "layer_scale_init_value", float, default=0.1),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(
        Fixed("use_qk_norm", (False,)),
        Fixed("norm_type", ("layer_norm",)),
        Fixed("use_absolute_position_embeddings", (True,)),
        Fixed("use_mask_token", (False,)),
        Fixed("use_mean_pooling", (True,)),
        *(Fixed(key, (0.0,), written=False) for key in ("dropout", "hidden_dropout_prob", "projection_dropout")),
        *NOT_A_CHOICE,
    ),
    ignored=TOWER_IGNORED,
    import_extra=import_tower,
    import_extra_keys=(*SIZES, "attention_bias"),
    export_extra=export_tower,
)

# -- names -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unsqueezed(Rule):
    """One tensor, with `leading` dimensions of size 1 in front there."""

    leading: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [1, S, H] -> [S, H], or [1, 1, H] -> [H]
        return tensors[0].flatten(0, self.leading)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.reshape((1,) * self.leading + tuple(tensor.shape))]


THEIR_LAYER = "encoder.layer.{i}."
LAYER = (
    ("input_layernorm", "layernorm_before"),
    ("self_attention.linear_proj", "attention.projection_layer"),
    ("pre_mlp_layernorm", "layernorm_after"),
    ("mlp.linear_fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2"),
)


def tower_map(config: VisionEncoderConfig) -> NameMap:
    """Names within the tower; models with one add a prefix to theirs."""
    rules: list[Rule] = [
        *with_bias(f"{OURS}conv1", "embeddings.patch_embeddings.projection"),
        Unsqueezed(f"{OURS}position_embeddings.weight", "embeddings.position_embeddings"),
        Unsqueezed(f"{OURS}class_token", "embeddings.cls_token", leading=2),
        *(Same(f"{OUR_LAYER}ls{number}.weight", f"{THEIR_LAYER}lambda_{number}") for number in (1, 2)),
        *layer_rules(config, THEIR_LAYER, "attention", LAYER),
    ]
    return NameMap(rules, config.num_layers)


# -- configuration -----------------------------------------------------------------------------------


def import_side(ratio: float) -> int:
    """Side of the square that becomes one feature, as the class rounds it."""
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
    tower = {"model_type": MODEL_TYPE, **(external.get("vision_config") or {})}
    require_known("vision_config.model_type", str(tower["model_type"]), [MODEL_TYPE])
    text = {"model_type": "qwen2", **(external.get("text_config") or {})}
    return {
        "vision_model": TOWER.import_value(tower),
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
    tower = TOWER.export_value(config.vision_model.model_dump())
    return {
        "vision_config": {"model_type": MODEL_TYPE, **tower},
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
    tower = tower_map(config.vision_model)
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
