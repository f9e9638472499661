"""Dense Nemotron (Nemotron-4, Minitron) in Hugging Face's format: a GPT with squared ReLU, partly rotated heads,
grouped queries, and norms whose weights are stored less one (layernorm1p)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, LessOne, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    POSITIONS,
    THEIRS,
    import_partial_rope,
    longest_sequence,
    negated,
)
from mt_models.gpt.config import FACTORS, GPTConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, per_layer

MODEL_TYPE = "nemotron"
ACTIVATIONS: Mapping[str, str] = {"relu2": "squared_relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
BACK = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
DEMANDS: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "normalization": ("LayerNorm",),
    "activation": tuple(BACK),
    "rotary_interleaved": (False,),
    "embedding_layernorm": (False,),
    "parallel_residual": (False,),
    "add_qkv_bias": (False,),
    "qk_layernorm": (False,),
    "hidden_dropout": (0.0,),
    "moe": (None,),
    **FACTORS,
}
"""Keys of [model] and the values that the format can express."""
STEM = "model."
OUTPUT = "lm_head"


def name_map(config: GPTConfig) -> NameMap:
    norms = {
        f"{OURS}input_layernorm": f"{THEIRS}input_layernorm",
        f"{OURS}pre_mlp_layernorm": f"{THEIRS}post_attention_layernorm",
        "decoder.final_layernorm": f"{STEM}norm",
    }
    kinds = ("weight", "bias") if config.add_bias_linear else ("weight",)
    rules: list[Rule] = [Same("embedding.word_embeddings.weight", f"{STEM}embed_tokens.weight")]
    for ours, theirs in norms.items():
        rules += [LessOne(f"{ours}.weight", f"{theirs}.weight"), Same(f"{ours}.bias", f"{theirs}.bias")]
    rules += [rule for kind in kinds for rule in _matrix_rules(config, kind)]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", f"{OUTPUT}.weight"))
    ignored = per_layer([f"{THEIRS}self_attn.rotary_emb.inv_freq"], config.num_layers)
    return NameMap(rules, config.num_layers, ignored=ignored)


def _matrix_rules(config: GPTConfig, kind: str) -> list[Rule]:
    return [
        GroupedQKV(
            f"{OURS}self_attention.linear_qkv.{kind}",
            tuple(f"{THEIRS}self_attn.{name}_proj.{kind}" for name in "qkv"),
            groups=config.query_groups,
            heads=config.num_attention_heads,
        ),
        Same(f"{OURS}self_attention.linear_proj.{kind}", f"{THEIRS}self_attn.o_proj.{kind}"),
        Same(f"{OURS}mlp.linear_fc1.{kind}", f"{THEIRS}mlp.up_proj.{kind}"),
        Same(f"{OURS}mlp.linear_fc2.{kind}", f"{THEIRS}mlp.down_proj.{kind}"),
    ]


def import_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(f"the activation {name!r} of a nemotron is not supported; it can be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    shares = ("partial_rotary_factor", "rope_percent", "rotary_percent")
    values = import_partial_rope(external, "nemotron", shares, ("rope_theta",), 0.5)
    _require_pairs(external, values["rotary_percent"])
    biases = external.get("attention_bias", False), external.get("mlp_bias", False)
    if biases[0] is not biases[1]:
        raise ConfigError(
            f"attention_bias={biases[0]} and mlp_bias={biases[1]} of a nemotron differ; they can be equal"
        )
    return {
        **values,
        **longest_sequence({POSITIONS: 4096, **external}),
        "normalization": "LayerNorm",
        "add_bias_linear": biases[0],
        "num_query_groups": external.get("num_key_value_heads"),
        "kv_channels": external.get("head_dim"),
    }


def _require_pairs(external: Mapping[str, Any], share: float) -> None:
    """Raises ConfigError for a share of a head that is no number of pairs, whose wavelengths transformers computes as
    those of a wider head."""
    heads, hidden = external.get("num_attention_heads"), external.get("hidden_size")
    width = external.get("head_dim") or (hidden // heads if heads and hidden else 0)
    if int(width * share) % 2:
        raise ConfigError(
            f"partial_rotary_factor={share} (in rope_parameters or rope_scaling, if one of them is there) of "
            f"head_dim={width} is an odd number of channels, {int(width * share)}; rotary positions turn pairs"
        )


def _export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = GPTConfig.model_validate(model)
    return {
        "rope_theta": config.rotary_base,
        "partial_rotary_factor": config.rotary_percent,
        **longest_sequence(model),
        "attention_bias": config.add_bias_linear,
        "mlp_bias": config.add_bias_linear,
        "intermediate_size": config.ffn_size,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
    }


CONFIG_MAP = ConfigMap(
    architecture=MODEL_TYPE,
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("intermediate_size", "ffn_hidden_size"),
        Field("norm_eps", "norm_epsilon", import_value=float, default=1e-5),
        Field("initializer_range", "init_method_std", import_value=float, default=0.0134),
        Field("attention_dropout", "attention_dropout", import_value=float, default=0.0),
        Field("tie_word_embeddings", "untie_embeddings_and_output_weights", negated, negated, default=False),
        Field("hidden_act", "activation", import_activation, BACK.get, default="relu2"),
    ),
    fixed=NOT_A_CHOICE,
    ignored=IGNORED,
    import_extra=_import_extra,
    import_extra_keys=(
        *(POSITIONS, "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_percent"),
        *("rotary_percent", "attention_bias", "mlp_bias", "num_key_value_heads", "head_dim"),
    ),
    export_extra=_export_extra,
)
