"""OLMoE in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    import_rope,
    norm_rules,
    require_even_heads,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    ExpertNames,
    export_balance,
    import_balance,
    mixed_feed_forward_rules,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.olmoe.config import OlmoeConfig

MOE_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")


def name_map(config: OlmoeConfig) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *norm_rules(QK_NORMS),
        *attention_rules(config),
        *mixed_feed_forward_rules(config, ExpertNames()),
    ]
    return decoder_name_map(config, layer)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": external.get("num_experts", external.get("num_local_experts", 64)),
        "moe_router_topk": external.get("num_experts_per_tok", 8),
        "moe_router_pre_softmax": not external.get("norm_topk_prob", False),
        **import_balance(external, default=0.01),
    }
    return {**import_rope(external), "moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = OlmoeConfig.model_validate(model)
    moe = MoEOptions(config)
    moe.require("olmoe", moe_ffn_hidden_size=ANY, moe_router_topk=ANY, moe_router_pre_softmax=ANY)
    require_even_heads(config, "olmoe")
    return {
        **export_rope(config),
        **export_balance(moe),
        "num_key_value_heads": config.query_groups,
        "intermediate_size": moe.ffn_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "norm_topk_prob": not moe["moe_router_pre_softmax"],
    }


OLMOE = ConfigMap(
    architecture="olmoe",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=4096),
        Field("num_key_value_heads", "num_query_groups"),
        Field("clip_qkv", "clip_qkv", lambda bound: None if bound is None else float(bound)),
    ),
    fixed=(SILU, Fixed("attention_bias", (False,)), *NOT_A_CHOICE),
    ignored={**IGNORED, **MOE_IGNORED},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="olmoe",
    model_types={"olmoe": OLMOE},
    name_map=name_map,
    copies=tied_output,
    architectures={"olmoe": "OlmoeForCausalLM"},
)
