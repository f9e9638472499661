"""GraniteMoeHybrid without experts, in Hugging Face's format.

A layer is Mamba or attention and then a gated feed-forward, thus two of ours. Attention has no positions, or
rotates all of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import import_rope, require_even_heads
from mt_models.blocks.hugging_face_mamba import (
    expansion,
    export_limits,
    import_limits,
    mamba_decoder_fields,
    mixer_rules,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, require_value
from mt_models.hybrid.config import ATTENTION, FEED_FORWARD, MAMBA, HybridConfig
from mt_models.hybrid.rules import attention_rules

KIND = "granitemoehybrid"
LAYER_TYPES = {"mamba": MAMBA, "attention": ATTENTION, "linear_attention": MAMBA, "full_attention": ATTENTION}
"""Older names, which every version reads, and those of transformers 5."""


def fits(config: HybridConfig) -> bool:
    """Whether a model has the layers of this format: a gated feed-forward after every Mamba or attention layer."""
    layers = config.layers
    alternate = not len(layers) % 2 and set(layers[1::2]) == {FEED_FORWARD} and set(layers[0::2]) <= {MAMBA, ATTENTION}
    whole = config.position_embedding_type == "none" or config.rotary_percent == 1.0
    return config.activation == "swiglu" and alternate and whole


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
        # Gate and up are one tensor there too, gate first.
        Same(f"{second}mlp.linear_fc1.weight", f"{theirs}shared_mlp.input_linear.weight"),
        Same(f"{second}mlp.linear_fc2.weight", f"{theirs}shared_mlp.output_linear.weight"),
    ]


# -- configuration ---------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = external["hidden_size"], external["num_attention_heads"]
    scale = float(external.get("attention_multiplier", 1.0))
    # A file has the number in decimal, thus the tolerance.
    usual = math.isclose(scale, (hidden // heads) ** -0.5, rel_tol=1e-6)
    kinds = [LAYER_TYPES[require_known("layer_types", kind, LAYER_TYPES)] for kind in _layer_types(external)]
    inner, mamba_heads = external.get("mamba_expand", 2) * hidden, external.get("mamba_n_heads", 128)
    return {
        "hybrid_layer_pattern": "".join(kind + FEED_FORWARD for kind in kinds),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": inner // mamba_heads,
        "ffn_hidden_size": external.get("shared_intermediate_size", 1024),
        "activation": "swiglu",
        "attention_multiplier": None if usual else scale,
        **import_positions(external),
        **import_limits(external.get("time_step_limit") or (0.0, float("inf"))),
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
        "shared_intermediate_size": config.ffn_size,
        "intermediate_size": config.ffn_size,
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": expansion(config),
        "time_step_limit": export_limits(config),
        "position_embedding_type": "rope" if rotary else None,
        **({"rope_theta": config.rotary_base} if rotary else {}),
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
        Fixed("num_local_experts", (0,)),
        Fixed("num_experts_per_tok", (0,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "intermediate_size": "of experts, of which there are none",
        "max_position_embeddings": "rotary positions have no last one",
        "normalization_function": "RMSNorm whatever it says",
        "output_router_logits": "of experts, of which there are none",
        "router_aux_loss_coef": "of experts, of which there are none",
        "mamba_d_head": "follows from mamba_expand and mamba_n_heads",
    },
    import_extra=import_extra,
    import_extra_keys=(
        "num_hidden_layers", "layer_types", "layers_block_type", "attention_multiplier", "shared_intermediate_size",
        "mamba_n_heads", "mamba_expand", "time_step_limit", "position_embedding_type", "rope_theta", "rope_parameters",
        "rope_scaling",
    ),
    export_extra=export_extra,
)  # fmt: skip
