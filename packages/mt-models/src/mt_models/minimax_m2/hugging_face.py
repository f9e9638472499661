"""MiniMax-M2 in Hugging Face's format, whose files hold experts under Mixtral's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope_and_share,
    norm_rules,
    one_of,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    export_balance,
    export_bias,
    import_bias,
    import_softmax_balance,
    mixed_feed_forward_rules,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.minimax_m2.config import MiniMaxM2Config
from mt_models.mixtral.hugging_face import NAMES as MIXTRAL_NAMES

NAMES = replace(MIXTRAL_NAMES, expert_bias="block_sparse_moe.e_score_correction_bias")
ROTATED, SHARE = "rotary_dim", "partial_rotary_factor"
KEYS = ("num_local_experts", "num_experts", "num_experts_per_tok", "router_jitter_noise", BIAS_KEY)

EXPRESSED = dict.fromkeys(("moe_ffn_hidden_size", "moe_router_topk", "moe_router_enable_expert_bias"), ANY)


def name_map(config: MiniMaxM2Config) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *norm_rules(QK_NORMS),
        *attention_rules(config),
        *mixed_feed_forward_rules(config, NAMES, always_biased=True),
    ]
    return decoder_name_map(config, layer)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    topk = external.get("num_experts_per_tok", 8)
    if topk < 2:
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 2 or more")
    moe: dict[str, Any] = {
        "num_experts": one_of(external, ("num_local_experts", "num_experts"), 256),
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        **import_bias(external),
        **import_softmax_balance(external, default=0.001),
    }
    if jitter := external.get("router_jitter_noise"):
        moe["moe_input_jitter_eps"] = float(jitter)
    return {**import_positions(external), "moe": moe}


def import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    """Published files say the number of rotated channels, later ones their share in the table."""
    head = external.get("head_dim", 128)
    stated = external.get(SHARE)
    if stated is None:
        stated = 1.0 if external.get(ROTATED) is None else external[ROTATED] / head
    return import_rope_and_share({**external, SHARE: stated}, 1.0, default_base=5000000.0)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MiniMaxM2Config.model_validate(model)
    moe = MoEOptions(config)
    moe.require("minimax_m2", **EXPRESSED, moe_router_score_function=("sigmoid",))
    return {
        **export_shape(config),
        **export_rope(config),
        **export_bias(moe),
        **export_balance(moe),
        ROTATED: config.rotary_dim,
        "intermediate_size": moe.ffn_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "router_jitter_noise": moe.options.get("moe_input_jitter_eps") or 0.0,
    }


MINIMAX_M2 = ConfigMap(
    architecture="minimax_m2",
    fields=(
        *decoder_fields(tied=False, positions=196608),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=128),
    ),
    fixed=(
        SILU,
        Fixed("use_qk_norm", (True,), written=False),
        Fixed("qk_norm_type", ("per_layer",), written=False),
        Fixed("scoring_func", ("sigmoid",), written=False),
        Fixed("use_routing_bias", (True,), written=False),
        Fixed("shared_intermediate_size", (0, None), written=False),
        Fixed("attention_bias", (False,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "attn_type_list": "of the code beside the first files; the class has one kind of attention",
        **dict.fromkeys(
            ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
            "of layers that predict further tokens, which the class has not; their tensors are refused by name",
        ),
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *KEYS, ROTATED, SHARE, "router_aux_loss_coef"),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="minimax_m2",
    model_types={"minimax_m2": MINIMAX_M2},
    name_map=name_map,
    copies=tied_output,
    architectures={"minimax_m2": "MiniMaxM2ForCausalLM"},
)
