"""OLMo-Hybrid in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    BRANCH_NORMS,
    FULL,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    THEIRS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_scaling,
    export_shape,
    feed_forward_rules,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_delta_net import LINEAR, Blocks, export_kinds, import_kinds
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.olmo_hybrid.config import OlmoHybridConfig

KIND = "olmo_hybrid"


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: OlmoHybridConfig) -> NameMap:
    rules: list[Rule] = []
    for number, linear in enumerate(config.linear_layers):
        mixer = _delta_net_rules(config) if linear else _attention_rules(config)
        rules += [rule.for_layer(number) for rule in (*mixer, *feed_forward_rules())]
    return decoder_name_map(config, rules)


def _attention_rules(config: OlmoHybridConfig) -> list[Rule]:
    bias = config.attention_bias
    behind_attention, behind_mlp = norm_rules(BRANCH_NORMS)
    # transformers renames the norm in saving as if it were that of a layer with a delta net.
    renamed = Same(behind_attention.ours, f"{THEIRS}feedforward_layer_norm.weight")
    return [
        replace(behind_attention, others=(renamed,)),
        behind_mlp,
        *norm_rules(QK_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
    ]


def _delta_net_rules(config: OlmoHybridConfig) -> list[Rule]:
    ours, theirs = f"{OURS}self_attention.", f"{THEIRS}linear_attn."
    keys, values, heads = config.linear_key_size, config.linear_value_size, config.linear_num_value_heads
    # Ours: q, k, v, z, b, a. The gate z is g_proj there.
    projections = tuple(f"{theirs}{name}_proj.weight" for name in "qkvgba")
    convolutions = tuple(f"{theirs}{name}_conv1d.weight" for name in "qkv")
    conv = f"{ours}conv1d.weight"
    same = {
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "out_norm.weight": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
    }
    return [
        *_pre_norm_rules(),
        Blocks(f"{ours}in_proj.weight", projections, sizes=(keys, keys, values, values, heads, heads)),
        # Published files have a convolution of each; transformers holds and may save them as one.
        Blocks(conv, convolutions, sizes=(keys, keys, values), others=(Same(conv, f"{theirs}conv1d.weight"),)),
        *(Same(ours + canonical, theirs + external) for canonical, external in same.items()),
    ]


def _pre_norm_rules() -> list[Rule]:
    """Norms of a layer with a delta net, under the names of published files or those of the class."""
    published = {"input_layernorm": "attention_layer_norm", "pre_mlp_layernorm": "feedforward_layer_norm"}
    return [
        Same(
            f"{OURS}{ours}.weight",
            f"{THEIRS}{published[ours]}.weight",
            others=(Same(f"{OURS}{ours}.weight", f"{THEIRS}{theirs}.weight"),),
        )
        for ours, theirs in PRE_NORMS.items()
    ]


# -- configuration -----------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = external.get("num_hidden_layers", 32), external.get("num_attention_heads", 30)
    keys, values = external.get("linear_num_key_heads") or heads, external.get("linear_num_value_heads") or heads
    # The class's own defaults.
    size = external.get("linear_key_head_dim") or int(0.75 * external["hidden_size"] / keys)
    return {
        **_import_positions(external),
        "linear_attention_freq": _kinds(external, layers),
        "num_query_groups": external.get("num_key_value_heads") or heads,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": external.get("linear_value_head_dim") or 2 * size,
    }


def _kinds(external: Mapping[str, Any], layers: int) -> int | str:
    kinds = external.get("layer_types")
    if kinds is None:
        kinds = [FULL if layer % 4 == 3 else LINEAR for layer in range(layers)]
        # The class has attention at least in the last layer.
        kinds[-1] = kinds[-1] if FULL in kinds else FULL
    return import_kinds({"layer_types": kinds}, layers)


def _import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    """A base of null means none at all."""
    table = external.get("rope_scaling") or external.get("rope_parameters") or {}
    if table.get("rope_theta", external.get("rope_theta", 10000.0)) is None:
        return {"position_embedding_type": "none"}
    return {"position_embedding_type": "rope", **import_rope(external)}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = OlmoHybridConfig.model_validate(model)
    even = config.hidden_size // config.num_attention_heads
    require_value(config, "head_dim", (even,), KIND)
    rotated = config.position_embedding_type == "rope"
    table = {
        **(export_scaling(config) or {"rope_type": "default"}),
        "rope_theta": config.rotary_base if rotated else None,
    }
    values = {**export_shape(config), "rope_parameters": table, "layer_types": export_kinds(config)}
    # Its default would have to be within the vocabulary, and keep the row of that token from being trained.
    values["pad_token_id"] = None
    # The class has no such field: a head is hidden_size / num_attention_heads.
    del values["head_dim"]
    return values


OLMO_HYBRID = ConfigMap(
    architecture=KIND,
    fields=(
        *decoder_fields(tied=False, positions=65536),
        Field("num_key_value_heads", "num_query_groups"),
        Field("attention_bias", "attention_bias", default=False),
        Field("linear_num_key_heads", "linear_num_key_heads"),
        Field("linear_num_value_heads", "linear_num_value_heads"),
        Field("linear_key_head_dim", "linear_key_head_dim"),
        Field("linear_value_head_dim", "linear_value_head_dim"),
        Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
        Field("linear_allow_neg_eigval", "linear_allow_neg_eigval", default=True),
        Field("linear_a_log_min", "linear_a_log_min", import_value=float, default=0.0),
        Field("linear_a_log_max", "linear_a_log_max", import_value=float, default=16.0),
        Field("linear_dt_min", "linear_dt_min", import_value=float, default=1e-3),
        Field("linear_dt_max", "linear_dt_max", import_value=float, default=0.1),
        Field("linear_dt_init_floor", "linear_dt_init_floor", import_value=float, default=1e-4),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored={**IGNORED, "linear_use_gate": "the class always has the gate"},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, "layer_types"),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: OLMO_HYBRID},
    name_map=name_map,
    copies=tied_output,
    architectures={KIND: "OlmoHybridForCausalLM"},
)
