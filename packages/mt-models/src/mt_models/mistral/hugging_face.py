"""Mistral in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    feed_forward_rules,
    import_rope,
    norm_rules,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.mistral.config import MistralConfig


def name_map(config: MistralConfig) -> NameMap:
    return decoder_name_map(config, [*norm_rules(PRE_NORMS), *attention_rules(config), *feed_forward_rules()])


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    # Absent means 4096 there, null means no window.
    return {**import_rope(external), "sliding_window": external.get("sliding_window", 4096)}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MistralConfig.model_validate(model)
    return {**export_shape(config), **export_rope(config), "sliding_window": config.sliding_window}


MISTRAL = ConfigMap(
    architecture="mistral",
    fields=(
        *decoder_fields(tied=False, positions=4096 * 32),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored=IGNORED,
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, "sliding_window"),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="mistral",
    model_types={"mistral": MISTRAL},
    name_map=name_map,
    copies=tied_output,
    architectures={"mistral": "MistralForCausalLM"},
)
