"""Qwen2-MoE and Qwen3-MoE in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    norm_rules,
    require_even_heads,
    rope_to_ours,
    rope_to_theirs,
    shape_to_theirs,
)
from mt_models.blocks.hugging_face_mixture import (
    MIXTURE_IGNORED,
    SILU,
    ExpertNames,
    balance_to_ours,
    balance_to_theirs,
    mixed_feed_forward_rules,
)
from mt_models.blocks.mixture import ANY, Mixture, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.qwen_moe.config import QwenMoeConfig

NAMES = ExpertNames(shared="mlp.shared_expert")
MOE_KEYS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "layer_types",
)  # fmt: skip
WINDOWS = {
    "sliding_window": "only counts with use_sliding_window",
    "max_window_layers": "only counts with use_sliding_window",
}


def name_map(config: QwenMoeConfig) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *(norm_rules(QK_NORMS) if config.qk_layernorm else ()),
        *attention_rules(config, qkv_bias=config.add_qkv_bias),
        *mixed_feed_forward_rules(config, NAMES),
    ]
    return decoder_name_map(config, layer)


def model_type_of(config: QwenMoeConfig) -> str:
    if config.qk_layernorm:
        return "qwen3_moe"
    return "qwen2_moe"


def layers_to_ours(external: Mapping[str, Any], num_layers: int) -> int | str:
    """`decoder_sparse_step` and `mlp_only_layers` as moe_layer_freq."""
    step, dense = external.get("decoder_sparse_step", 1), external.get("mlp_only_layers") or []
    return frequency_of([layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)])


def layers_to_theirs(mixture: Mixture) -> dict[str, Any]:
    dense = [number for number, has_experts in enumerate(mixture.layers) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def mixture_to_ours(external: Mapping[str, Any], *, topk: int, experts: int, ffn: int) -> dict[str, Any]:
    """Options of model.moe that both generations have; topk, experts, ffn: defaults there."""
    return {
        "num_experts": external.get("num_experts", external.get("num_local_experts", experts)),
        "moe_router_topk": external.get("num_experts_per_tok", topk),
        "moe_router_pre_softmax": not external.get("norm_topk_prob", False),
        "moe_ffn_hidden_size": external.get("moe_intermediate_size", ffn),
        "moe_layer_freq": layers_to_ours(external, external.get("num_hidden_layers", 24)),
        **balance_to_ours(external, default=0.001),
    }


def qwen2_to_ours(external: Mapping[str, Any]) -> dict[str, Any]:
    shared = {
        "moe_shared_expert_intermediate_size": external.get("shared_expert_intermediate_size", 5632),
        "moe_shared_expert_gate": True,
    }
    _require_full_attention(external)
    return {
        **rope_to_ours(external),
        "add_qkv_bias": external.get("qkv_bias", True),
        "qk_layernorm": False,
        "moe": {**mixture_to_ours(external, topk=4, experts=60, ffn=1408), **shared},
    }


def qwen3_to_ours(external: Mapping[str, Any]) -> dict[str, Any]:
    _require_full_attention(external)
    return {
        **rope_to_ours(external),
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "moe": mixture_to_ours(external, topk=8, experts=128, ffn=768),
    }


def _require_full_attention(external: Mapping[str, Any]) -> None:
    others = {kind for kind in external.get("layer_types") or () if kind != FULL}
    if others:
        raise ConfigError(f"layer_types has {', '.join(sorted(others))}, which is not supported; it can be {FULL}")


def further_back(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    mixture = Mixture(config)
    return {
        **shape_to_theirs(config),
        **rope_to_theirs(config),
        **balance_to_theirs(mixture),
        **layers_to_theirs(mixture),
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.topk,
        "norm_topk_prob": not mixture["moe_router_pre_softmax"],
        "moe_intermediate_size": mixture.ffn_size,
    }


BOTH = dict.fromkeys(("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"), ANY)


def qwen2_to_theirs(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    mixture = Mixture(config)
    allowed = {**BOTH, "moe_shared_expert_intermediate_size": ANY, "moe_shared_expert_gate": (True,)}
    if mixture.shared_size is None:
        raise ConfigError(
            "model.moe.moe_shared_expert_intermediate_size is not set: a Hugging Face qwen2_moe has a shared expert; "
            "model.qk_layernorm=true is written as qwen3_moe, which has none"
        )
    mixture.require("qwen2_moe", **allowed)
    require_even_heads(config, "qwen2_moe")
    values = further_back(model)
    del values["head_dim"]
    return {**values, "qkv_bias": config.add_qkv_bias, "shared_expert_intermediate_size": mixture.shared_size}


def qwen3_to_theirs(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    Mixture(config).require("qwen3_moe", **BOTH)
    if config.add_qkv_bias:
        raise ConfigError("model.add_qkv_bias=true cannot be written as a Hugging Face qwen3_moe; it can be false")
    return further_back(model)


FIXED = (SILU, Fixed("use_sliding_window", (False,)), *NOT_A_CHOICE)
QWEN2_MOE = ConfigMap(
    architecture="qwen2_moe",
    fields=(
        *decoder_fields(tied=False, positions=32768),
        Field("num_key_value_heads", "num_query_groups", default=16),
    ),
    fixed=FIXED,
    ignored={**IGNORED, **MIXTURE_IGNORED, **WINDOWS},
    further=qwen2_to_ours,
    further_keys=(*ROPE_KEYS, *MOE_KEYS, "shared_expert_intermediate_size", "qkv_bias"),
    further_back=qwen2_to_theirs,
)
QWEN3_MOE = ConfigMap(
    architecture="qwen3_moe",
    fields=(
        *decoder_fields(tied=False, positions=32768),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(Fixed("attention_bias", (False,)), *FIXED),
    ignored={**IGNORED, **MIXTURE_IGNORED, **WINDOWS},
    further=qwen3_to_ours,
    further_keys=(*ROPE_KEYS, *MOE_KEYS),
    further_back=qwen3_to_theirs,
)

HUGGING_FACE = HuggingFaceFamily(
    family="qwen_moe",
    model_types={"qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={"qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"},
)
