"""Qwen3.5 and 3.6 with pictures in Hugging Face's format, `qwen3_5` and `qwen3_5_moe`.

Files with an image tower are read as this family; their decoders alone are the family qwen_next. The layer of
multi-token prediction is read where a file has its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Fixed
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.hugging_face_decoder import rope_table
from mt_models.hugging_face import GELU_TANH, IGNORED, NOT_A_CHOICE, HuggingFaceFamily
from mt_models.qwen3_vl.hugging_face import (
    VISION_FIELDS,
    copies,
    export_vision,
    image_text_map,
    nested,
    tower_rules,
)
from mt_models.qwen_next import hugging_face as qwen_next
from mt_models.qwen_next_vl.config import QwenNextVLConfig, QwenNextVLDecoderConfig
from mt_models.qwen_vl.hugging_face import import_axial, pixel_preprocessor

DENSE, SPARSE = "qwen3_5", "qwen3_5_moe"
DECODERS = {DENSE: qwen_next.QWEN3_5, SPARSE: qwen_next.QWEN3_5_MOE}
SECTIONS = [11, 11, 10]

# -- configuration -----------------------------------------------------------------------------------

VISION = ConfigMap(
    architecture="qwen3_5_vision",
    fields=VISION_FIELDS,
    fixed=(
        Fixed("hidden_act", GELU_TANH),
        Fixed("deepstack_visual_indexes", ([],), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={**IGNORED, "out_hidden_size": "is the hidden_size of the decoder"},
    import_extra=import_axial,
    import_extra_keys=("in_channels", "in_chans", "rope_parameters"),
    export_extra=export_vision,
)


def import_decoder(kind: str, external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model]."""
    text = dict(external.get("text_config") or {})
    rope = rope_table(text, partial_rotary_factor=text.get("partial_rotary_factor", 0.25), mrope_section=SECTIONS)
    # The outer class ties its LM head by its own key.
    text["tie_word_embeddings"] = external.get("tie_word_embeddings", False)
    return {**DECODERS[kind].import_value(text), "mrope_section": list(rope["mrope_section"])}


def export_decoder(decoder: QwenNextVLDecoderConfig) -> dict[str, Any]:
    """text_config."""
    kind = model_type_of_decoder(decoder)
    text = DECODERS[kind].export_value(decoder.model_dump(mode="json", exclude={"mrope_section"}))
    rope = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        **(text.pop("rope_scaling") or {}),
        "partial_rotary_factor": text.pop("partial_rotary_factor"),
        "mrope_section": decoder.mrope_section,
        "mrope_interleaved": True,
    }
    return {**text, "model_type": f"{kind}_text", "rope_parameters": rope}


def model_type_of_decoder(decoder: Any) -> str:
    return DENSE if decoder.moe is None else SPARSE


def model_type_of(config: QwenNextVLConfig) -> str:
    return model_type_of_decoder(config.language_model)


def _map_of(kind: str) -> ConfigMap:
    return image_text_map(
        kind,
        VISION,
        QwenNextVLConfig,
        import_decoder,
        export_decoder,
        image_token=248056,
        fixed=(Fixed("language_model_only", (False,), written=False),),
        ignored={"hidden_size": "repeats that of the decoder"},
    )


# -- names -------------------------------------------------------------------------------------------


def beside_tower(rule: Rule) -> Rule:
    """The rule of a decoder that is a part of the model."""
    return replace(
        rule,
        ours=f"language_model.{rule.ours}",
        theirs=tuple(map(nested, rule.sources)),
        others=tuple(map(beside_tower, rule.others)),
    )


def name_map(config: QwenNextVLConfig) -> NameMap:
    decoder = qwen_next.name_map(config.decoder)
    ignored = {nested(name) for name in decoder.ignored if not name.startswith("model.visual.")}
    rules = [*tower_rules(config.vision_model), *map(beside_tower, decoder.rules)]
    return NameMap(rules, 0, ignored)


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """See the function of the decoder. A configuration without text_config, of which all values are defaults, has it
    added, as the count stands there."""
    return qwen_next.held({**external, "text_config": external.get("text_config") or {}}, names)


HUGGING_FACE = HuggingFaceFamily(
    "qwen_next_vl",
    {DENSE: _map_of(DENSE), SPARSE: _map_of(SPARSE)},
    name_map,
    model_type_of=model_type_of,
    copies=copies,
    held=held,
    architectures={DENSE: "Qwen3_5ForConditionalGeneration", SPARSE: "Qwen3_5MoeForConditionalGeneration"},
    preprocessor=pixel_preprocessor("Qwen3VLProcessor"),
)
