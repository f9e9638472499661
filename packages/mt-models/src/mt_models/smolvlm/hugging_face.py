"""SmolVLM and Idefics3 in Hugging Face's format: `idefics3` and `smolvlm`, which compute the same.

Both are read; `idefics3` is written, which more versions and programs read. Names:

| part | begins with |
| --- | --- |
| tower | `model.vision_model.` |
| projection | `model.connector.modality_projection.proj.weight` |
| decoder without its LM head | `model.text_model.` |
| LM head | `lm_head.weight` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Same
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.llava import hugging_face as llava
from mt_models.llava.image_processor import read_processor, require_size, trained_keys, written_processor
from mt_models.smolvlm.config import SmolVLMConfig
from mt_models.vision import hugging_face as vision

STEM, DECODER, OUTPUT = "model.", "model.text_model.", "lm_head.weight"
CONNECTOR = "model.connector.modality_projection.proj.weight"

# -- configuration -----------------------------------------------------------------------------------

TOWER_TYPES = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm", "siglip_vision_model")
"""`vision_config.model_type` in published files; the first is written."""
TOWER_DEFAULTS = {"hidden_size": 1152, "num_attention_heads": 16}
"""Where the class's defaults are not those of SigLIP."""
FIXED_IN_TEXT = {"use_resampler": False, "qk_layer_norms": False}
"""Fields of `text_config` in published files that are left at these values."""
IGNORED_IN_TEXT = {
    "neftune_noise_alpha": "noise in training",
    "perceiver_config": "of a resampler, which use_resampler leaves out",
    "pixel_shuffle_factor": "repeats scale_factor, which the class reads",
    "_flash_attn_2_enabled": "which kernel computed attention",
}


def import_tower(external: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vision_model_type": "siglip",
        "add_pooler": False,
        "use_scaled_init_method": False,
        **vision.import_sizes(external, patch=32),
    }


def export_tower(model: Mapping[str, Any]) -> dict[str, Any]:
    if model["add_pooler"]:
        raise ConfigError(
            "model.vision_model.add_pooler=true cannot be written as the tower of a Hugging Face idefics3, which has "
            "no pooled vector; train with add_pooler=false"
        )
    return vision.export_sizes(model)


TOWER = ConfigMap(
    architecture=TOWER_TYPES[0],
    fields=(
        *(
            replace(field, default=TOWER_DEFAULTS.get(field.theirs, field.default))
            for field in vision.tower_fields(activation="gelu_pytorch_tanh", epsilon=1e-6)
        ),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **vision.TOWER_IGNORED,
        "size": "of the images' processor",
        "max_image_size": "of the images' processor",
        "use_base_siglip": "which published tower the sizes are of",
    },
    import_extra=import_tower,
    import_extra_keys=vision.SIZES,
    export_extra=export_tower,
)


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of tower and decoder, and the vocabulary, which is the whole model's."""
    tower = {"model_type": TOWER_TYPES[0], **(external.get("vision_config") or {})}
    require_known("vision_config.model_type", str(tower["model_type"]), TOWER_TYPES)
    text = text_fields(external.get("text_config") or {})
    return {
        "vision_model": TOWER.import_value(tower),
        **llava.import_decoder({**external, "text_config": text}),
    }


def text_fields(external: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `text_config` that are the decoder's own. Raises ConfigError for a resampler or norms of heads."""
    for key, value in FIXED_IN_TEXT.items():
        if external.get(key, value) != value:
            raise ConfigError(f"text_config.{key}={external[key]!r} is not supported; it can be {value}")
    # The rest goes to the decoder's map, which refuses what it has no meaning for.
    return {key: value for key, value in external.items() if key not in FIXED_IN_TEXT | IGNORED_IN_TEXT}


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = SmolVLMConfig.model_validate(model)
    tower = TOWER.export_value(config.vision_model.model_dump())
    return {"vision_config": {"model_type": TOWER_TYPES[0], **tower}, **llava.export_decoder(config)}


IDEFICS3 = ConfigMap(
    architecture="idefics3",
    fields=(
        Field("image_token_id", "image_token_index", default=128257),
        Field("scale_factor", "scale_factor", default=2),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **IGNORED,
        "vocab_size": "text_config has it",
        "_pad_token_id": "ids of special tokens belong to the tokenizer",
        "perceiver_config": "of a resampler, which no published file uses",
        "use_reentrant_checkpointing": "how training saved memory",
    },
    import_extra=import_parts,
    import_extra_keys=("vision_config", "text_config", "tie_word_embeddings"),
    export_extra=export_parts,
)

# -- names -------------------------------------------------------------------------------------------


def name_map(config: SmolVLMConfig) -> NameMap:
    tower = vision.tower_map(config.vision_model)
    decoder = llava.decoder_map(config, DECODER, OUTPUT)
    rules = [
        *llava.prefixed(tower.rules, theirs=STEM),
        Same("vision_projection.encoder.weight", CONNECTOR),
        *decoder.rules,
    ]
    return NameMap(rules, 0, ignored=[*(STEM + name for name in tower.ignored), *decoder.ignored])


def copies(config: SmolVLMConfig) -> Mapping[str, str]:
    return llava.tied_output(config, name_map(config), OUTPUT)


# -- images ------------------------------------------------------------------------------------------


def write_preprocessor(config: SmolVLMConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """A longer side of one tile makes one view."""
    side = config.vision_model.img_h
    keys = trained_keys(config, data, {"image_longest_edge": side})
    return {
        **written_processor("Idefics3ImageProcessor", "Idefics3Processor", keys),
        "do_image_splitting": True,
        "do_pad": True,
        "size": {"longest_edge": keys["image_longest_edge"]},
        "max_image_size": {"longest_edge": side},
    }


def read_preprocessor(config: SmolVLMConfig, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for tiles of another size than the tower's, and for images that are not cut."""
    keys = read_processor(config, external, {"do_image_splitting": True})
    require_size(config, "max_image_size", external.get("max_image_size"))
    edge = (external.get("size") or {}).get("longest_edge")
    return keys if edge is None else keys | {"image_longest_edge": edge}


HUGGING_FACE = HuggingFaceFamily(
    "smolvlm",
    {"idefics3": IDEFICS3, "smolvlm": IDEFICS3},
    name_map,
    model_type_of=lambda config: "idefics3",
    copies=copies,
    architectures={"idefics3": "Idefics3ForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
)
