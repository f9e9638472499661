"""Qwen2-MoE and Qwen3-MoE in Hugging Face's format, and the same with sigmoid scores and shared experts in
GLM-4.5's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope,
    norm_rules,
    require_even_heads,
    require_full_attention,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_balance,
    import_balance,
    mixed_feed_forward_rules,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.deepseek import hugging_face as deepseek
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.qwen_moe.config import QwenMoeConfig
from mt_models.qwen_moe.glm4_moe import GLM4_MOE, KIND, is_glm4_moe

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
    glm = is_glm4_moe(config.moe)
    experts = (
        mixed_feed_forward_rules(config, ExpertNames(), always_biased=True)
        if glm
        else mixed_feed_forward_rules(config, NAMES)
    )
    predicted = deepseek.prediction_rules(config, _predicted_rules) if glm else []
    names = decoder_name_map(config, [*_attention_rules(config), *experts, *predicted])
    return NameMap(names.rules, 0, names.ignored | (deepseek.unread_prediction(config) if glm else frozenset()))


def _attention_rules(config: QwenMoeConfig) -> list[Rule]:
    """The rules of attention, and of the norms of a layer."""
    heads = norm_rules(QK_NORMS) if config.qk_layernorm else []
    return [*norm_rules(PRE_NORMS), *heads, *attention_rules(config, qkv_bias=config.add_qkv_bias)]


def _predicted_rules(config: QwenMoeConfig, number: int) -> list[Rule]:
    """Rules of a layer of multi-token prediction, which has experts."""
    experts = expert_rules(MoEOptions(config), ExpertNames(), always_biased=True)
    return [rule.for_layer(number) for rule in (*_attention_rules(config), *experts)]


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none."""
    if external.get("model_type") != KIND:
        return external
    return deepseek.held({"num_hidden_layers": 46, **external}, names)


def model_type_of(config: QwenMoeConfig) -> str:
    if is_glm4_moe(config.moe):
        return KIND
    if config.qk_layernorm:
        return "qwen3_moe"
    return "qwen2_moe"


def import_layers(external: Mapping[str, Any], num_layers: int) -> int | str:
    """`decoder_sparse_step` and `mlp_only_layers` as moe_layer_freq."""
    step, dense = external.get("decoder_sparse_step", 1), external.get("mlp_only_layers") or []
    # Every step-th layer has experts, unless it is named as dense.
    return frequency_of([layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)])


def export_layers(moe: MoEOptions) -> dict[str, Any]:
    dense = [number for number, has_experts in enumerate(moe.layers) if not has_experts]
    # Any pattern can be written as a list of the dense layers.
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def import_moe(external: Mapping[str, Any], *, topk: int, experts: int, ffn: int) -> dict[str, Any]:
    """Options of model.moe that both generations have; topk, experts, ffn: defaults there."""
    return {
        "num_experts": external.get("num_experts", external.get("num_local_experts", experts)),
        "moe_router_topk": external.get("num_experts_per_tok", topk),
        # Softmax over all experts, divided by the sum over the chosen, is the softmax over the chosen alone:
        # post-softmax in Megatron's terms. Without the division it is pre-softmax.
        "moe_router_pre_softmax": not external.get("norm_topk_prob", False),
        "moe_ffn_hidden_size": external.get("moe_intermediate_size", ffn),
        "moe_layer_freq": import_layers(external, external.get("num_hidden_layers", 24)),
        **import_balance(external, default=0.001),
    }


def qwen2_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    shared = {
        "moe_shared_expert_intermediate_size": external.get("shared_expert_intermediate_size", 5632),
        "moe_shared_expert_gate": True,
    }
    require_full_attention(external)
    return {
        **import_rope(external),
        "add_qkv_bias": external.get("qkv_bias", True),
        "qk_layernorm": False,
        "moe": {**import_moe(external, topk=4, experts=60, ffn=1408), **shared},
    }


def qwen3_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    require_full_attention(external)
    return {
        **import_rope(external),
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "moe": import_moe(external, topk=8, experts=128, ffn=768),
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    moe = MoEOptions(config)
    return {
        **export_shape(config),
        **export_rope(config),
        **export_balance(moe),
        **export_layers(moe),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "norm_topk_prob": not moe["moe_router_pre_softmax"],
        "moe_intermediate_size": moe.ffn_size,
    }


BOTH = dict.fromkeys(("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"), ANY)


def qwen2_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    moe = MoEOptions(config)
    require_value(config, "rotary_percent", (1.0,), "qwen2_moe")
    require_value(config, "mtp_num_layers", (0,), "qwen2_moe")
    allowed = {**BOTH, "moe_shared_expert_intermediate_size": ANY, "moe_shared_expert_gate": (True,)}
    if moe.shared_size is None:
        raise ConfigError(
            "model.moe.moe_shared_expert_intermediate_size is not set: a Hugging Face qwen2_moe has a shared expert; "
            "model.qk_layernorm=true is written as qwen3_moe, which has none"
        )
    moe.require("qwen2_moe", **allowed)
    require_even_heads(config, "qwen2_moe")
    values = export_extra(model)
    # The class has no such field: a head is hidden_size / num_attention_heads, as checked above.
    del values["head_dim"]
    return {**values, "qkv_bias": config.add_qkv_bias, "shared_expert_intermediate_size": moe.shared_size}


def qwen3_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenMoeConfig.model_validate(model)
    require_value(config, "rotary_percent", (1.0,), "qwen3_moe")
    require_value(config, "mtp_num_layers", (0,), "qwen3_moe")
    MoEOptions(config).require("qwen3_moe", **BOTH)
    if config.add_qkv_bias:
        raise ConfigError("model.add_qkv_bias=true cannot be written as a Hugging Face qwen3_moe; it can be false")
    return export_extra(model)


FIXED = (SILU, Fixed("use_sliding_window", (False,)), *NOT_A_CHOICE)
QWEN2_MOE = ConfigMap(
    architecture="qwen2_moe",
    fields=(
        *decoder_fields(tied=False, positions=32768),
        Field("num_key_value_heads", "num_query_groups", default=16),
    ),
    fixed=FIXED,
    ignored={**IGNORED, **MOE_IGNORED, **WINDOWS},
    import_extra=qwen2_import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, "shared_expert_intermediate_size", "qkv_bias"),
    export_extra=qwen2_export_extra,
)
QWEN3_MOE = ConfigMap(
    architecture="qwen3_moe",
    fields=(
        *decoder_fields(tied=False, positions=32768),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(
        Fixed("attention_bias", (False,)),
        Fixed("qkv_bias", (False,), written=False),
        Fixed("use_qk_norm", (True,), written=False),
        Fixed("shared_expert_intermediate_size", (0, None), written=False),
        *FIXED,
    ),
    ignored={**IGNORED, **MOE_IGNORED, **WINDOWS},
    import_extra=qwen3_import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS),
    export_extra=qwen3_export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="qwen_moe",
    model_types={"qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE, KIND: GLM4_MOE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    left_out_copies=deepseek.prediction_copies,
    held=held,
    architectures={
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        KIND: "Glm4MoeForCausalLM",
    },
)
