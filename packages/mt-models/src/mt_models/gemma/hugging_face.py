"""Gemma 2 and 3 (text) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    QK_NORMS,
    ROPE_KEYS,
    SLIDING,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_scaling,
    export_shape,
    feed_forward_rules,
    import_pattern,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.gemma.config import GemmaConfig
from mt_models.hugging_face import (
    GELU_TANH,
    IGNORED,
    NOT_A_CHOICE,
    HuggingFaceFamily,
    require_value,
    tied_output,
)

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def name_map(config: GemmaConfig) -> NameMap:
    layer = [
        *norm_rules(NORMS),
        *(norm_rules(QK_NORMS) if config.qk_layernorm else ()),
        *attention_rules(config),
        *feed_forward_rules(),
    ]
    return decoder_name_map(config, layer)


def model_type_of(config: GemmaConfig) -> str:
    if config.qk_layernorm:
        require_value(config, "attn_logit_softcapping", (None,), "gemma3_text")
        return "gemma3_text"
    require_value(config, "rope_scaling_type", ("none",), "gemma2")
    require_value(config, "rotary_base_local", (config.rotary_base,), "gemma2")
    return "gemma2"


# -- rotary positions --------------------------------------------------------------------------------


def gemma2_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    values = import_rope(external)
    if "rope_scaling_type" in values:
        raise ConfigError(
            f"rope_parameters or rope_scaling of type {values['rope_scaling_type']} is not supported in a gemma2; it "
            "can be null or default"
        )
    # Gemma 2 rotates local and global layers alike.
    return {**values, "rotary_base_local": values["rotary_base"]}


def gemma3_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    """From `rope_parameters` by kind of layer (transformers 5), or the older keys."""
    # One table for each kind of layer; older files have rope_theta and rope_scaling for
    # global layers and rope_local_base_freq for local ones.
    kinds = external.get("rope_parameters") or {}
    whole = import_rope({**external, "rope_parameters": kinds.get(FULL)}, default_base=1000000.0)
    local = import_rope(
        {"rope_parameters": kinds.get(SLIDING), "rope_theta": external.get("rope_local_base_freq", 10000.0)}
    )
    if "rope_scaling_type" in local or set(kinds) - {FULL, SLIDING}:
        raise ConfigError(
            f"rope_parameters={dict(kinds)} is not supported: it has the keys {FULL} and {SLIDING}, and the rope_type "
            f"of {SLIDING} can only be default"
        )
    return {**whole, "rotary_base_local": local["rotary_base"]}


# -- configuration -----------------------------------------------------------------------------------


def real(value: Any) -> float | None:
    return None if value is None else float(value)


ATTENTION_CAP = "attn_logit_softcapping"


def _own_fields(*, positions: int, final_cap: float | None) -> tuple[Field, ...]:
    return (
        *decoder_fields(tied=True, positions=positions),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels", default=256),
        Field("sliding_window", "sliding_window", default=4096),
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", import_value=real, default=256),
        Field("final_logit_softcapping", "final_logit_softcapping", import_value=real, default=final_cap),
    )


FIXED = (
    Fixed("hidden_activation", (*GELU_TANH, None)),
    Fixed("attention_bias", (False,)),
    Fixed("use_bidirectional_attention", (False, None)),
    *NOT_A_CHOICE,
)
IGNORED_HERE = {
    **IGNORED,
    "hidden_act": "of Gemma 1; hidden_activation is what counts",
    "sliding_window_size": "repeats sliding_window, which the class reads",
}


def gemma2_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qk_layernorm": False,
        "sliding_window_pattern": import_pattern(external, 2),
        **gemma2_rope(external),
    }


def gemma3_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qk_layernorm": True,
        "sliding_window_pattern": import_pattern(external, 6),
        **gemma3_rope(external),
    }


def _sizes(config: GemmaConfig) -> dict[str, Any]:
    return {
        **export_shape(config),
        "layer_types": layer_types(config),
        "query_pre_attn_scalar": whole_if_it_is(config.query_pre_attn_scalar or config.head_dim),
        "rope_theta": config.rotary_base,
    }


def whole_if_it_is(number: float) -> float | int:
    """transformers expects an int here."""
    return int(number) if number == int(number) else number


def gemma2_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    return _sizes(GemmaConfig.model_validate(model))


def gemma3_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = GemmaConfig.model_validate(model)
    rope = {"rope_local_base_freq": config.rotary_base_local, "rope_scaling": export_scaling(config)}
    return {**_sizes(config), **rope}


GEMMA2 = ConfigMap(
    architecture="gemma2",
    fields=(
        *_own_fields(positions=8192, final_cap=30.0),
        Field(ATTENTION_CAP, ATTENTION_CAP, import_value=real, default=50.0),
    ),
    fixed=FIXED,
    ignored=IGNORED_HERE,
    import_extra=gemma2_import_extra,
    import_extra_keys=(*ROPE_KEYS, "layer_types"),
    export_extra=gemma2_export_extra,
)
GEMMA3 = ConfigMap(
    architecture="gemma3_text",
    fields=_own_fields(positions=131072, final_cap=None),
    # The class does not read it.
    fixed=(*FIXED, Fixed(ATTENTION_CAP, (None,))),
    ignored=IGNORED_HERE,
    import_extra=gemma3_import_extra,
    import_extra_keys=(
        *ROPE_KEYS,
        "rope_local_base_freq",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    ),
    export_extra=gemma3_export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="gemma",
    model_types={"gemma2": GEMMA2, "gemma3_text": GEMMA3},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"},
)
