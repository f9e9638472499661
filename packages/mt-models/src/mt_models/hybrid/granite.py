"""GraniteMoeHybrid (Granite 4.0 H) in Hugging Face's format.

A layer is Mamba or attention and then a gated feed-forward, or experts with a shared one, thus two of ours. Attention
has no positions, or rotates all of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import POSITIONS, import_rope, longest_sequence, require_even_heads
from mt_models.blocks.hugging_face_mamba import (
    expansion,
    export_limits,
    import_limits,
    mamba_decoder_fields,
    mixer_rules,
)
from mt_models.blocks.hugging_face_moe import MOE_IGNORED, export_balance, import_balance
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, require_value
from mt_models.hybrid.config import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA, HybridConfig
from mt_models.hybrid.rules import attention_rules

KIND = "granitemoehybrid"
LAYER_TYPES = {"mamba": MAMBA, "attention": ATTENTION, "linear_attention": MAMBA, "full_attention": ATTENTION}
"""Older names, which every version reads, and those of transformers 5."""


def fits(config: HybridConfig) -> bool:
    """Whether a model has the layers of this format: a gated feed-forward, or experts, after every Mamba or attention
    layer."""
    layers = config.layers
    alternate = not len(layers) % 2 and set(layers[0::2]) <= {MAMBA, ATTENTION}
    alike = set(layers[1::2]) in ({FEED_FORWARD}, {EXPERTS})
    whole = config.position_embedding_type == "none" or config.rotary_percent == 1.0
    return config.activation == "swiglu" and alternate and alike and whole


def name_map(config: HybridConfig) -> NameMap:
    rules: list[Rule] = [Same("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for number, kind in enumerate(config.layers[0::2]):
        rules += _layer_rules(config, number, kind)
    rules.append(Same("decoder.final_layernorm.weight", "model.norm.weight"))
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


def _layer_rules(config: HybridConfig, number: int, kind: str) -> list[Rule]:
    first, second = f"decoder.layers.{2 * number}.", f"decoder.layers.{2 * number + 1}."
    theirs = f"model.layers.{number}."
    if kind == MAMBA:
        norm, block = "norm", mixer_rules(config, f"{first}mixer.", f"{theirs}mamba.")
    else:
        norm, block = "input_layernorm", attention_rules(config, f"{first}self_attention.", f"{theirs}self_attn.")
    return [
        Same(f"{first}{norm}.weight", f"{theirs}input_layernorm.weight"),
        *block,
        Same(f"{second}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight"),
        *(_feed_forward(f"{second}mlp.", theirs) if config.moe is None else _experts(f"{second}mlp.", theirs)),
    ]


def _feed_forward(ours: str, theirs: str) -> list[Rule]:
    # Gate and up are one tensor there too, gate first.
    return [
        Same(f"{ours}linear_fc1.weight", f"{theirs}shared_mlp.input_linear.weight"),
        Same(f"{ours}linear_fc2.weight", f"{theirs}shared_mlp.output_linear.weight"),
    ]


EXPERT_NAMES = {
    "router.weight": ("router.layer.weight", "router.weight"),
    "experts.linear_fc1.weight": ("input_linear.weight", "experts.gate_up_proj"),
    "experts.linear_fc2.weight": ("output_linear.weight", "experts.down_proj"),
}
"""Ours -> that of published files, and that in the memory of transformers."""


def _experts(ours: str, theirs: str) -> list[Rule]:
    """[experts, 2 ffn, hidden] and [experts, hidden, ffn] here and there."""
    block = f"{theirs}block_sparse_moe."
    return [
        *(
            Same(ours + canonical, block + published, others=(Same(ours + canonical, block + in_memory),))
            for canonical, (published, in_memory) in EXPERT_NAMES.items()
        ),
        *_feed_forward(f"{ours}shared_experts.", theirs),
    ]


# -- configuration ---------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = external["hidden_size"], external["num_attention_heads"]
    scale = float(external.get("attention_multiplier", 1.0))
    # A file has the number in decimal, thus the tolerance.
    usual = math.isclose(scale, (hidden // heads) ** -0.5, rel_tol=1e-6)
    kinds = [LAYER_TYPES[require_known("layer_types", kind, LAYER_TYPES)] for kind in _layer_types(external)]
    inner, mamba_heads = external.get("mamba_expand", 2) * hidden, external.get("mamba_n_heads", 128)
    experts = external.get("num_local_experts", 8)
    return {
        "hybrid_layer_pattern": "".join(kind + (EXPERTS if experts else FEED_FORWARD) for kind in kinds),
        **({"moe": _import_experts(external, experts)} if experts else {}),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": inner // mamba_heads,
        "ffn_hidden_size": external.get("shared_intermediate_size", 1024),
        "activation": "swiglu",
        "attention_multiplier": None if usual else scale,
        **import_positions(external),
        **longest_sequence(external),
        **import_limits(external.get("time_step_limit") or (0.0, float("inf"))),
    }


def _import_experts(external: Mapping[str, Any], experts: int) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "moe_router_topk": external.get("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": external.get("intermediate_size", 11008),
        "moe_shared_expert_intermediate_size": external.get("shared_intermediate_size", 1024),
        **import_balance(external, default=0.001),
    }


def _layer_types(external: Mapping[str, Any]) -> list[str]:
    kinds = external.get("layer_types") or external.get("layers_block_type")
    layers = external["num_hidden_layers"]
    if kinds is None:
        return ["mamba"] * int(layers)
    if len(kinds) != layers:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers={layers}")
    return list(kinds)


def import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    if external.get("position_embedding_type") != "rope":
        return {"position_embedding_type": "none"}
    values = import_rope(external)
    if "rope_scaling_type" in values:
        raise ConfigError(
            f"rope_parameters or rope_scaling of type {values['rope_scaling_type']} is not supported in a {KIND}; it "
            "can be null or default"
        )
    return {"position_embedding_type": "rope", "rotary_base": values["rotary_base"], "rotary_percent": 1.0}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HybridConfig.model_validate(model)
    for key, value in (
        ("normalization", "RMSNorm"),
        ("hidden_dropout", 0.0),
        ("add_bias_linear", False),
        ("fp32_residual_connection", False),
        ("use_scaled_init_method", True),
    ):
        require_value(config, key, (value,), KIND)
    require_value(config, "position_embedding_type", ("none", "rope"), KIND)
    require_even_heads(config, KIND)
    kinds = config.layers[0::2]
    rotary = config.position_embedding_type == "rope"
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": ["mamba" if kind == MAMBA else "attention" for kind in kinds],
        "num_key_value_heads": config.query_groups,
        "attention_multiplier": config.attention_multiplier or config.head_dim**-0.5,
        **_export_feed_forward(config),
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": expansion(config),
        "time_step_limit": export_limits(config),
        "position_embedding_type": "rope" if rotary else None,
        **longest_sequence(model),
        **({"rope_theta": config.rotary_base} if rotary else {}),
    }


def _export_feed_forward(config: HybridConfig) -> dict[str, Any]:
    if config.moe is None:
        sizes = ("shared_intermediate_size", "intermediate_size")
        return {**dict.fromkeys(sizes, config.ffn_size), "num_local_experts": 0, "num_experts_per_tok": 0}
    moe = MoEOptions(config)
    expressed = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    moe.require(KIND, **dict.fromkeys(expressed, ANY))
    if moe.shared_size is None:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size is not set, and a Hugging Face {KIND} has shared experts "
            "in every layer; set their width"
        )
    return {
        "shared_intermediate_size": moe.shared_size,
        "intermediate_size": moe.ffn_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        **export_balance(moe),
    }


GRANITE = ConfigMap(
    architecture=KIND,
    fields=(
        Field("vocab_size", "vocab_size", default=32000),
        Field("hidden_size", "hidden_size", default=4096),
        Field("num_attention_heads", "num_attention_heads", default=32),
        Field("num_key_value_heads", "num_query_groups"),
        Field("embedding_multiplier", "embedding_multiplier", import_value=float, default=1.0),
        Field("residual_multiplier", "residual_multiplier", import_value=float, default=1.0),
        Field("logits_scaling", "logits_scaling", import_value=float, default=1.0),
        *mamba_decoder_fields(epsilon=1e-6),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("attention_bias", (False,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "normalization_function": "RMSNorm whatever it says",
        "mamba_d_head": "follows from mamba_expand and mamba_n_heads",
    },
    import_extra=import_extra,
    import_extra_keys=(
        POSITIONS, "num_hidden_layers",
        "layer_types", "layers_block_type", "attention_multiplier", "shared_intermediate_size",
        "num_local_experts", "num_experts_per_tok", "intermediate_size", "router_aux_loss_coef",
        "mamba_n_heads", "mamba_expand", "time_step_limit", "position_embedding_type", "rope_theta", "rope_parameters",
        "rope_scaling",
    ),
    export_extra=export_extra,
)  # fmt: skip
