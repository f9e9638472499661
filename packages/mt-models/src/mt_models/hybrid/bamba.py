"""Bamba in Hugging Face's format: a layer is Mamba or attention and then a gated feed-forward, thus two of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    POSITIONS,
    import_rope,
    longest_sequence,
    require_even_heads,
    rope_table,
)
from mt_models.blocks.hugging_face_mamba import (
    KERNELS,
    expansion,
    export_limits,
    import_limits,
    mamba_decoder_fields,
    mixer_rules,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, OF_GENERATION, require_value
from mt_models.hybrid.config import ATTENTION, FEED_FORWARD, MAMBA, NEUTRAL_FACTORS, HybridConfig
from mt_models.hybrid.rules import attention_rules, gated_feed_forward_rules

ROTATED = 0.5
"""Fraction of a head's channels: the class fixes it."""


# -- names -----------------------------------------------------------------------------------------


def name_map(config: HybridConfig) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *(rule for number, kind in enumerate(_kinds(config)) for rule in _layer_rules(config, number, kind)),
        Same("decoder.final_layernorm.weight", "model.final_layernorm.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


def _layer_rules(config: HybridConfig, number: int, kind: str) -> list[Rule]:
    # Layer 3 there is layers 6 (Mamba or attention) and 7 (feed-forward) here, each with its norm.
    first, second = f"decoder.layers.{2 * number}.", f"decoder.layers.{2 * number + 1}."
    theirs = f"model.layers.{number}."
    if kind == MAMBA:
        norm = Same(f"{first}norm.weight", f"{theirs}input_layernorm.weight")
        block = mixer_rules(config, f"{first}mixer.", f"{theirs}mamba.")
    else:
        norm = Same(f"{first}input_layernorm.weight", f"{theirs}input_layernorm.weight")
        block = attention_rules(config, f"{first}self_attention.", f"{theirs}self_attn.")
    return [
        norm,
        *block,
        Same(f"{second}pre_mlp_layernorm.weight", f"{theirs}pre_ff_layernorm.weight"),
        *gated_feed_forward_rules(f"{second}mlp.", f"{theirs}feed_forward."),
    ]


def _kinds(config: HybridConfig) -> str:
    """What comes before the feed-forward in each Bamba layer. Raises ConfigError for a pattern of another form."""
    layers = config.layers
    kinds, feed_forwards = layers[0::2], layers[1::2]
    if len(layers) % 2 or set(kinds) - {MAMBA, ATTENTION} or set(feed_forwards) != {FEED_FORWARD}:
        raise ConfigError(
            f"model.hybrid_layer_pattern={config.hybrid_layer_pattern!r} cannot be written as a Hugging Face bamba, "
            f"which has {FEED_FORWARD} behind every {MAMBA} or {ATTENTION} and nowhere else; without rotary positions "
            "(model.position_embedding_type=none) it can be written as a nemotron_h"
        )
    return kinds


# -- configuration ---------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    attention = external.get("attn_layer_indices") or []
    layers = range(external.get("num_hidden_layers", 32))
    if set(attention) - set(layers):
        raise ConfigError(
            f"attn_layer_indices={attention} names layers that are not among num_hidden_layers={len(layers)}"
        )
    pattern = "".join((ATTENTION if layer in attention else MAMBA) + FEED_FORWARD for layer in layers)
    hidden, heads = external.get("hidden_size", 4096), external.get("mamba_n_heads", 128)
    head_dim = _mamba_head_dim(external, hidden, heads)
    _require_pairs(hidden // external.get("num_attention_heads", 32))
    return {
        "hybrid_layer_pattern": pattern,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "rotary_base": _rotary_base(external),
        "rotary_percent": ROTATED,
        **longest_sequence(external),
        **import_limits(external.get("time_step_limit") or (0.0, float("inf"))),
    }


def _require_pairs(head_dim: int) -> None:
    """Raises ConfigError for heads of which no even number of channels is rotated."""
    rotated = int(head_dim * ROTATED)
    if rotated == 0 or rotated % 2:
        raise ConfigError(
            f"hidden_size / num_attention_heads = {head_dim}: a bamba rotates {rotated} channels of such a head, but "
            "positions turn pairs of channels; the size of a head has to be a multiple of 4"
        )


def _mamba_head_dim(external: Mapping[str, Any], hidden: int, heads: int) -> int:
    inner = external.get("mamba_expand", 2) * hidden
    head_size = external.get("mamba_d_head", "auto")
    # Compared with the whole width below, since // may have dropped a rest.
    head_dim = inner // heads if head_size == "auto" else head_size
    if head_dim * heads != inner:
        raise ConfigError(
            f"mamba_n_heads={heads} times mamba_d_head={head_size} is not mamba_expand x hidden_size = {inner}"
        )
    return int(head_dim)


def _rotary_base(external: Mapping[str, Any]) -> float:
    """Raises ConfigError for scaled positions, or another fraction than the class fixes."""
    table = rope_table(external, partial_rotary_factor=external.get("partial_rotary_factor", ROTATED))
    fraction = table.pop("partial_rotary_factor")
    values = import_rope({"rope_parameters": table})
    if "rope_scaling_type" in values or fraction != ROTATED:
        raise ConfigError(
            f"rope_parameters={external.get('rope_parameters')!r}, rope_scaling={external.get('rope_scaling')!r}, "
            f"partial_rotary_factor={fraction}: a bamba can be read with rope_type 'default' and partial_rotary_factor "
            f"{ROTATED}"
        )
    return float(values["rotary_base"])


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HybridConfig.model_validate(model)
    for key, value in (
        ("position_embedding_type", "rope"),
        ("rotary_percent", ROTATED),
        ("activation", "swiglu"),
        ("normalization", "RMSNorm"),
        ("hidden_dropout", 0.0),
        ("add_bias_linear", False),
        ("fp32_residual_connection", False),
        ("use_scaled_init_method", True),
        *NEUTRAL_FACTORS.items(),
    ):
        require_value(config, key, (value,), "bamba")
    require_even_heads(config, "bamba")
    kinds = _kinds(config)
    return {
        "num_hidden_layers": len(kinds),
        "attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == ATTENTION],
        "num_key_value_heads": config.query_groups,
        "intermediate_size": config.ffn_size,
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": expansion(config),
        "time_step_limit": export_limits(config),
        "rope_theta": config.rotary_base,
        "partial_rotary_factor": ROTATED,
        **longest_sequence(model),
    }


BAMBA = ConfigMap(
    architecture="bamba",
    fields=(
        Field("vocab_size", "vocab_size", default=128000),
        Field("hidden_size", "hidden_size", default=4096),
        Field("intermediate_size", "ffn_hidden_size", default=14336),
        Field("num_attention_heads", "num_attention_heads", default=32),
        Field("num_key_value_heads", "num_query_groups", default=8),
        *mamba_decoder_fields(epsilon=1e-5),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("attention_bias", (False,)),
        Fixed("mlp_bias", (False,)),
        Fixed("z_loss_coefficient", (0.0, None)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "attn_rotary_emb": "the class rotates half of a head whatever it says",
        "use_mamba_kernels": KERNELS,
        "num_logits_to_keep": OF_GENERATION,
        "layers_block_type": "follows from attn_layer_indices",
        "layer_types": "follows from attn_layer_indices",
    },
    import_extra=import_extra,
    import_extra_keys=(
        POSITIONS,
        "attn_layer_indices", "num_hidden_layers", "mamba_n_heads", "mamba_d_head", "mamba_expand", "time_step_limit",
        "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor",
    ),
    export_extra=export_extra,
)  # fmt: skip
