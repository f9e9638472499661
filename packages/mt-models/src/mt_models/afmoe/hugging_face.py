"""AFMoE in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.afmoe.config import AfmoeConfig
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    QK_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.blocks.hugging_face_grouped_rows import GroupedRows
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    export_bias,
    first_dense,
    import_bias,
    mixed_feed_forward_rules,
    shared_experts,
)
from mt_models.blocks.hugging_face_windows import import_windows
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "post_mlp_layernorm": "post_mlp_layernorm",
}
NAMES = ExpertNames(
    router="mlp.router.gate.weight", stacked_router="mlp.router.gate.weight", expert_bias="mlp.expert_bias"
)


def name_map(config: AfmoeConfig) -> NameMap:
    layer = [
        *norm_rules(NORMS),
        *norm_rules(QK_NORMS),
        *gated_attention_rules(config),
        *mixed_feed_forward_rules(config, NAMES, always_biased=True),
    ]
    return decoder_name_map(config, layer)


def gated_attention_rules(config: AfmoeConfig) -> list[Rule]:
    """The gates of a group's query heads stand behind these."""
    heads = config.num_attention_heads // config.query_groups * config.head_dim
    return [
        GroupedRows(
            f"{OURS}self_attention.linear_qkv.weight",
            tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in ("q", "gate", "k", "v")),
            groups=config.query_groups,
            rows=(heads, heads, config.head_dim, config.head_dim),
        ),
        Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"),
    ]


# -- configuration -----------------------------------------------------------------------------------

LAYERS = 32
"""Number of layers of a file that does not say it."""
MOE_KEYS = (
    "num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size", "num_dense_layers",
    "route_scale", BIAS_KEY,
)  # fmt: skip
WINDOW_KEYS = ("layer_types", "global_attn_every_n_layers")


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    windows = import_windows(
        external.get("layer_types"), external.get("num_hidden_layers", LAYERS), external.get(WINDOW_KEYS[1], 4)
    )
    if windows != 1 and external.get("sliding_window", 1024) is None:
        raise ConfigError("sliding_window=None is not supported where layers have a window")
    return {**import_rope(external), "window_attn_skip_freq": windows, "moe": import_moe(external)}


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, topk = external.get("num_hidden_layers", LAYERS), external.get("num_experts_per_tok", 6)
    dense, width = min(external.get("num_dense_layers", 1), layers), external.get("moe_intermediate_size", 1408)
    scale, shared = float(external.get("route_scale", 1.0)), external.get("num_shared_experts", 2)
    if topk < 2:
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 2 or more")
    if shared < 1:
        raise ConfigError(f"num_shared_experts={shared} is not supported; it can be 1 or more")
    return {
        "num_experts": external.get("num_experts", 64),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * shared,
        "moe_layer_freq": frequency_of([False] * dense + [True] * (layers - dense)),
        "moe_router_score_function": "sigmoid",
        # The class has no balance loss.
        "moe_router_load_balancing_type": ["none"],
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
        **import_bias(external),
    }


EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias",
    ),
    ANY,
)  # fmt: skip


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = AfmoeConfig.model_validate(model)
    moe = MoEOptions(config)
    moe.require("afmoe", **EXPRESSED, moe_router_score_function=("sigmoid",))
    return {
        **export_shape(config),
        **export_rope(config),
        **export_bias(moe),
        "layer_types": layer_types(config),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "num_shared_experts": shared_experts(moe, "afmoe"),
        "moe_intermediate_size": moe.ffn_size,
        "num_dense_layers": first_dense(moe, "afmoe"),
        "route_scale": moe["moe_router_topk_scaling_factor"] or 1.0,
    }


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
}
AFMOE = ConfigMap(
    architecture="afmoe",
    fields=(
        *(
            Field(f.theirs, f.ours, f.import_value, f.export_value, DEFAULTS.get(f.theirs, f.default))
            for f in decoder_fields(tied=False, epsilon=1e-5, positions=16384)
        ),
        Field("num_key_value_heads", "num_query_groups"),
        Field("head_dim", "kv_channels", default=128),
        Field("sliding_window", "sliding_window", default=1024),
        Field("mup_enabled", "mup_enabled", bool, default=False),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        Fixed("score_func", ("sigmoid",), written=False),
        Fixed("route_norm", (True,), written=False),
        *(Fixed(key, (1, 0, None), written=False) for key in ("n_group", "num_expert_groups")),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        **dict.fromkeys(("topk_group", "num_limited_groups"), "only counts with groups of experts"),
        "use_grouped_mm": "which kernel multiplied the experts' matrices; model.moe.moe_grouped_gemm chooses one",
        "load_balance_coeff": "what a step of training adds to expert biases; model.moe.moe_router_bias_update_rate is",
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, *WINDOW_KEYS),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="afmoe",
    model_types={"afmoe": AFMOE},
    name_map=name_map,
    copies=tied_output,
    architectures={"afmoe": "AfmoeForCausalLM"},
)
