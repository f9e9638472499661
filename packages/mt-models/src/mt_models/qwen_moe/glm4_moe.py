"""GLM-4.5's format, which has MoE with sigmoid scores and shared experts, and grouped-query attention.

The model is a Qwen-MoE except for the router: heads may be normalized and queries, keys and values biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_models.blocks.hugging_face_decoder import (
    ROPE_KEYS,
    decoder_fields,
    export_rope,
    export_shape,
    import_rope_and_share,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    export_bias,
    first_dense,
    group_scores,
    import_bias,
    import_groups,
    require_normalized,
    shared_experts,
)
from mt_models.blocks.moe import ANY, MoEConfigLike, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE
from mt_models.qwen_moe.config import QwenMoeConfig

KIND, COUNT = "glm4_moe", "num_nextn_predict_layers"
KEYS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "partial_rotary_factor", BIAS_KEY,
)  # fmt: skip
EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias",
    ),
    ANY,
)  # fmt: skip


def is_glm4_moe(moe: Mapping[str, Any] | None) -> bool:
    """Whether model.moe has sigmoid scores and shared experts, which only this format has together."""
    options = moe or {}
    shared = options.get("moe_shared_expert_intermediate_size") is not None
    return options.get("moe_router_score_function") == "sigmoid" and shared


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    require_normalized(external)
    return {**import_rope_and_share(external, 0.5), "moe": import_moe(external)}


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, width = external["num_hidden_layers"], external["moe_intermediate_size"]
    dense = min(external.get("first_k_dense_replace", 1), layers)
    scale = float(external.get("routed_scaling_factor", 1.0))
    return {
        "num_experts": external["n_routed_experts"],
        "moe_router_topk": external["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * external.get("n_shared_experts", 1),
        "moe_layer_freq": frequency_of([False] * dense + [True] * (layers - dense)),
        "moe_router_score_function": "sigmoid",
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
        **import_bias(external),
        **import_groups(external, score_topk=2),
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    return {
        **export_shape(config),
        **export_rope(config),
        **export_moe(config, KIND),
        "partial_rotary_factor": config.rotary_percent,
    }


def export_moe(config: MoEConfigLike, kind: str) -> dict[str, Any]:
    """The way back of import_moe. Raises ConfigError for experts that a Hugging Face `kind` has not."""
    moe = MoEOptions(config)
    scores = group_scores(moe, 2)
    moe.require(kind, **EXPRESSED, moe_router_score_function=("sigmoid",), moe_router_group_score_topk=scores)
    return {
        **export_bias(moe),
        "first_k_dense_replace": first_dense(moe, kind),
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared_experts(moe, kind),
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
    }


GLM4_MOE = ConfigMap(
    architecture=KIND,
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=131072),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "add_qkv_bias", default=False),
        Field("use_qk_norm", "qk_layernorm", default=False),
        Field(COUNT, "mtp_num_layers", import_value=lambda count: int(count or 0), default=0),
    ),
    fixed=(SILU, Fixed("moe_layer_freq", (1,)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
    },
    spellings={"num_local_experts": "n_routed_experts", "num_mtp_layers": COUNT},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *KEYS),
    export_extra=export_extra,
)
