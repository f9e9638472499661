"""Mixtral in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    norm_rules,
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
from mt_models.blocks.mixture import ANY, Mixture
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.mixtral.config import MixtralConfig

NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{e}.w1.weight",
    up="block_sparse_moe.experts.{e}.w3.weight",
    down="block_sparse_moe.experts.{e}.w2.weight",
)
MOE_KEYS = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise")


def name_map(config: MixtralConfig) -> NameMap:
    layer = [*norm_rules(PRE_NORMS), *attention_rules(config), *mixed_feed_forward_rules(config, NAMES)]
    return decoder_name_map(config, layer)


def further(external: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": external.get("num_local_experts", 8),
        "moe_router_topk": external.get("num_experts_per_tok", 2),
        **balance_to_ours(external, default=0.001),
    }
    if jitter := external.get("router_jitter_noise"):
        moe["moe_input_jitter_eps"] = float(jitter)
    return {**rope_to_ours(external, default_base=1e6), "sliding_window": external.get("sliding_window"), "moe": moe}


def further_back(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MixtralConfig.model_validate(model)
    mixture = Mixture(config)
    mixture.require("mixtral", moe_ffn_hidden_size=ANY, moe_router_topk=ANY)
    return {
        **shape_to_theirs(config),
        **rope_to_theirs(config),
        **balance_to_theirs(mixture),
        "intermediate_size": mixture.ffn_size,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.topk,
        "router_jitter_noise": mixture.options.get("moe_input_jitter_eps") or 0.0,
        "sliding_window": config.sliding_window,
    }


MIXTRAL = ConfigMap(
    architecture="mixtral",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=4096 * 32),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(SILU, *NOT_A_CHOICE),
    ignored={**IGNORED, **MIXTURE_IGNORED},
    further=further,
    further_keys=(*ROPE_KEYS, *MOE_KEYS, "sliding_window"),
    further_back=further_back,
)

HUGGING_FACE = HuggingFaceFamily(
    family="mixtral",
    model_types={"mixtral": MIXTRAL},
    name_map=name_map,
    copies=tied_output,
    architectures={"mixtral": "MixtralForCausalLM"},
)
