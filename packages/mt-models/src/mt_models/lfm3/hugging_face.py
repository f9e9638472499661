"""LFM3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    QK_NORMS,
    SLIDING,
    THEIRS,
    attention_rules,
    decoder_fields,
    norm_rules,
)
from mt_models.blocks.hugging_face_rope_by_kind import export_rope_by_kind, import_rope_by_kind
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.lfm3.config import CONV, GLOBAL, WINDOW, Lfm3Config, usual_pattern

KINDS = {"conv": CONV, SLIDING: WINDOW, FULL: GLOBAL}
"""Values of `layer_types` -> letters of layer_pattern."""
NORMS = {"input_layernorm": "operator_norm", "pre_mlp_layernorm": "ffn_norm"}


def name_map(config: Lfm3Config) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *(rule.for_layer(number) for number in range(config.num_layers) for rule in layer_rules(config, number)),
        Same("decoder.final_layernorm.weight", "model.embedding_norm.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


def layer_rules(config: Lfm3Config, number: int) -> list[Rule]:
    is_convolution = config.is_convolution(number)
    norms = {**NORMS, **(branch_norms(is_convolution) if config.use_sandwich_norm else {})}
    fc1 = tuple(f"{THEIRS}feed_forward.{name}.weight" for name in ("w1", "w3"))  # gate, up
    return [
        *norm_rules(norms),
        *(convolution_rules(config) if is_convolution else gated_attention_rules(config)),
        Concatenate(f"{OURS}mlp.linear_fc1.weight", fc1),
        Same(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}feed_forward.w2.weight"),
    ]


def branch_norms(is_convolution: bool) -> dict[str, str]:
    ours = "post_short_conv_layernorm" if is_convolution else "post_self_attn_layernorm"
    return {ours: "post_operator_norm", "post_mlp_layernorm": "post_ffn_norm"}


def gated_attention_rules(config: Lfm3Config) -> list[Rule]:
    bias = config.attention_bias
    rules = [*norm_rules(QK_NORMS), *attention_rules(config, qkv_bias=bias, output_bias=bias)]
    if config.use_attention_gate:
        rules.append(Same(f"{OURS}self_attention.linear_gate.weight", f"{THEIRS}self_attn.gate_proj.weight"))
    return rules


def spelling(config: Lfm3Config, name: str) -> str:
    """In memory transformers has another name for the gates than files."""
    return name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")


def convolution_rules(config: Lfm3Config) -> list[Rule]:
    kinds = ("weight", "bias") if config.conv_bias else ("weight",)
    return [
        Same(f"{OURS}short_conv.{name}.{kind}", f"{THEIRS}conv.{name}.{kind}")
        for name in ("in_proj", "conv", "out_proj")
        for kind in kinds
    ]


# -- configuration -----------------------------------------------------------------------------------

LAYERS = 24
"""Number of layers of a file that does not say it."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    pattern = import_pattern(external)
    kinds = pattern or usual_pattern(external.get("num_hidden_layers", LAYERS))
    if WINDOW in kinds and external.get("sliding_window", 256) is None:
        raise ConfigError(f"sliding_window=None is not supported where layer_types has {SLIDING}")
    return {**import_rope_by_kind(external, (1000000.0, 10000.0), share=0.5), "layer_pattern": pattern}


def import_pattern(external: Mapping[str, Any]) -> str | None:
    kinds = external.get("layer_types")
    if kinds is None:
        return None
    if (layers := external.get("num_hidden_layers", LAYERS)) != len(kinds) or set(kinds) - set(KINDS):
        raise ConfigError(
            f"layer_types={kinds} is not supported; it can be {', '.join(KINDS)} for each of {layers} layers"
        )
    pattern = "".join(KINDS[kind] for kind in kinds)
    return None if pattern == usual_pattern(layers) else pattern


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Lfm3Config.model_validate(model)
    require_value(config, "rope_scaling_type", ("none", "linear"), "lfm3")
    names = {letter: kind for kind, letter in KINDS.items()}
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.query_groups,
        "intermediate_size": config.ffn_size,
        "layer_types": [names[letter] for letter in config.layer_kinds],
        "rope_parameters": export_rope_by_kind(config),
    }


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
}
LFM3 = ConfigMap(
    architecture="lfm3",
    fields=(
        *(
            Field(f.theirs, f.ours, f.import_value, f.export_value, DEFAULTS.get(f.theirs, f.default))
            for f in decoder_fields(tied=True, positions=128000)
            if f.theirs != "rms_norm_eps"
        ),
        Field("norm_eps", "norm_epsilon", float, default=1e-5),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels", default=128),
        Field("conv_L_cache", "conv_kernel", default=7),
        Field("conv_bias", "conv_bias", default=False),
        Field("sliding_window", "sliding_window", default=256),
        Field("attention_bias", "attention_bias", default=False),
        Field("use_attention_gate", "use_attention_gate", default=True),
        Field("use_sandwich_norm", "use_sandwich_norm", default=True),
    ),
    fixed=NOT_A_CHOICE,
    ignored=IGNORED,
    import_extra=import_extra,
    import_extra_keys=("layer_types", "rope_parameters"),
    export_extra=export_extra,
    spellings={"rms_norm_eps": "norm_eps"},
)

HUGGING_FACE = HuggingFaceFamily(
    family="lfm3",
    model_types={"lfm3": LFM3},
    name_map=name_map,
    copies=tied_output,
    spelling=spelling,
    architectures={"lfm3": "Lfm3ForCausalLM"},
)
