"""OLMo 2 and 3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    BRANCH_NORMS,
    FULL,
    QK_NORMS,
    ROPE_KEYS,
    SLIDING,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_scaling,
    export_shape,
    feed_forward_rules,
    import_pattern,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.olmo.config import OlmoConfig

BASE = 500000.0
"""OLMo 3's base where a file says none."""


def name_map(config: OlmoConfig) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norm_rules(BRANCH_NORMS),
        *norm_rules(QK_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *feed_forward_rules(),
    ]
    return decoder_name_map(config, layer)


def model_type_of(config: OlmoConfig) -> str:
    return "olmo2" if config.sliding_window is None else "olmo3"


# -- rotary positions of OLMo 3: a table for each kind of layer ---------------------------------------


def olmo3_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    kinds = dict(external.get("rope_parameters") or {})
    if set(kinds) - {FULL, SLIDING}:
        raise ConfigError(f"rope_parameters={kinds} is not supported: it has the keys {FULL} and {SLIDING}")
    beside, scaling = external.get("rope_theta", BASE), external.get("rope_scaling") or {}
    # The name under which a message says what is wrong.
    name = "rope_scaling" if scaling else "rope_parameters"
    whole = import_rope({name: {**(kinds.get(FULL) or {}), **scaling}, "rope_theta": beside})
    local = import_rope({"rope_parameters": kinds.get(SLIDING), "rope_theta": BASE})
    if "rope_scaling_type" in local:
        raise ConfigError(f"rope_parameters={kinds} is not supported: the rope_type of {SLIDING} can only be default")
    if beside != BASE and "rope_theta" not in (kinds.get(SLIDING) or {}):
        raise ConfigError(
            f"rope_theta={beside} is not supported without rope_parameters.{SLIDING}.rope_theta, since the class "
            f"rotates layers with a window by {BASE} then; it can be {BASE}"
        )
    same = local["rotary_base"] == whole["rotary_base"]
    return {**whole, **({} if same else {"rotary_base_local": local["rotary_base"]})}


def olmo3_export_rope(config: OlmoConfig) -> dict[str, Any]:
    local = config.rotary_base_local or config.rotary_base
    if local == config.rotary_base == BASE:
        return export_rope(config)  # which every version of the class reads
    whole = export_scaling(config) or {"rope_type": "default"}
    return {
        "rope_parameters": {
            FULL: {**whole, "rope_theta": config.rotary_base},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        }
    }


# -- configuration -----------------------------------------------------------------------------------


def olmo3_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    kinds = external.get("layer_types")
    if kinds is not None and len(kinds) != external.get("num_hidden_layers", 32):
        raise ConfigError(f"layer_types has {len(kinds)} entries; it needs one for each of num_hidden_layers")
    return {**olmo3_rope(external), "sliding_window_pattern": import_pattern({"layer_types": kinds}, 4)}


def olmo2_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = OlmoConfig.model_validate(model)
    return {**export_shape(config), **export_rope(config)}


def olmo3_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = OlmoConfig.model_validate(model)
    return {**export_shape(config), **olmo3_export_rope(config), "layer_types": layer_types(config)}


FIELDS = (
    *decoder_fields(tied=False, epsilon=1e-5, positions=2048),
    Field("num_key_value_heads", "num_query_groups"),
    Field("head_dim", "kv_channels"),
    Field("attention_bias", "attention_bias", default=False),
)
FIXED = (Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE)
OLMO2 = ConfigMap(
    architecture="olmo2",
    fields=FIELDS,
    fixed=FIXED,
    ignored=IGNORED,
    import_extra=import_rope,
    import_extra_keys=ROPE_KEYS,
    export_extra=olmo2_export_extra,
)
OLMO3 = ConfigMap(
    architecture="olmo3",
    fields=(*FIELDS, Field("sliding_window", "sliding_window", default=4096)),
    fixed=FIXED,
    ignored=IGNORED,
    import_extra=olmo3_import_extra,
    import_extra_keys=(*ROPE_KEYS, "layer_types"),
    export_extra=olmo3_export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="olmo",
    model_types={"olmo2": OLMO2, "olmo3": OLMO3},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"},
)
