"""LFM2 in Hugging Face's format: dense models, and those with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    export_rope,
    import_rope,
    negated,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    ExpertNames,
    expert_rules,
    first_dense,
    require_normalized,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.lfm2.config import Lfm2Config

DENSE, EXPERTS = "lfm2", "lfm2_moe"
CONV = "conv"
NORMS = {"input_layernorm": "operator_norm", "pre_mlp_layernorm": "ffn_norm"}
HEAD_NORMS = {
    "self_attention.q_layernorm": "self_attn.q_layernorm",
    "self_attention.k_layernorm": "self_attn.k_layernorm",
}
TIED = ("tie_word_embeddings", "tie_embedding")
WIDTH = ("block_ff_dim", "intermediate_size")
ADJUST, MULTIPLIER, MULTIPLE = "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
KINDS, ATTENTION = "layer_types", "full_attn_idxs"
FEED = "feed_forward."
NAMES = ExpertNames(
    router=f"{FEED}gate.weight",
    gate=f"{FEED}experts.{{e}}.w1.weight",
    up=f"{FEED}experts.{{e}}.w3.weight",
    down=f"{FEED}experts.{{e}}.w2.weight",
    expert_bias=f"{FEED}expert_bias",
    stacked_router=f"{FEED}gate.weight",
    stacked_gate_up=f"{FEED}experts.gate_up_proj",
    stacked_down=f"{FEED}experts.down_proj",
)


def name_map(config: Lfm2Config) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *(rule.for_layer(number) for number in range(config.num_layers) for rule in layer_rules(config, number)),
        Same("decoder.final_layernorm.weight", "model.embedding_norm.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


def layer_rules(config: Lfm2Config, number: int) -> list[Rule]:
    mixer = convolution_rules(config) if config.conv_layers[number] else attention_rules(config)
    return [*norm_rules(NORMS), *mixer, *feed_forward_rules(config, number)]


def feed_forward_rules(config: Lfm2Config, number: int) -> list[Rule]:
    if config.moe is not None and MoEOptions(config).layers[number]:
        return expert_rules(MoEOptions(config), NAMES)
    fc1 = tuple(f"{THEIRS}{FEED}{name}.weight" for name in ("w1", "w3"))  # gate, up
    return [
        Concatenate(f"{OURS}mlp.linear_fc1.weight", fc1),
        Same(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}{FEED}w2.weight"),
    ]


def attention_rules(config: Lfm2Config) -> list[Rule]:
    qkv = GroupedQKV(
        f"{OURS}self_attention.linear_qkv.weight",
        tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in "qkv"),
        groups=config.query_groups,
        heads=config.num_attention_heads,
    )
    out = Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.out_proj.weight")
    return [qkv, out, *norm_rules(HEAD_NORMS)]


def convolution_rules(config: Lfm2Config) -> list[Rule]:
    kinds = ("weight", "bias") if config.conv_bias else ("weight",)
    return [
        Same(f"{OURS}short_conv.{name}.{kind}", f"{THEIRS}conv.{name}.{kind}")
        for name in ("in_proj", "conv", "out_proj")
        for kind in kinds
    ]


def model_type_of(config: Lfm2Config) -> str:
    return DENSE if config.moe is None else EXPERTS


# -- configuration: dense ------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **import_rope(external, 1000000.0),
        "ffn_hidden_size": import_width(external),
        "conv_layer_pattern": import_layers(external),
        "untie_embeddings_and_output_weights": negated(tied(external)),
    }


def tied(external: Mapping[str, Any]) -> bool:
    """The older key counts where a file has both."""
    return bool(external.get("tie_embedding", external.get("tie_word_embeddings", True)))


def import_width(external: Mapping[str, Any]) -> int:
    """Width of the feed-forward: two thirds of what the file says, rounded up to a multiple, unless it says that it is
    as it stands there."""
    width = external.get("block_ff_dim", external.get("intermediate_size", 12288))
    if not external.get(ADJUST, True):
        return int(width)
    width = int(2 * width / 3)
    factor = external.get(MULTIPLIER, 1.0)
    if factor is None:
        return width
    multiple = external.get(MULTIPLE, 256)
    return multiple * -(-int(factor * width) // multiple)


def import_layers(external: Mapping[str, Any]) -> str | None:
    layers, kinds = external.get("num_hidden_layers", 32), external.get(KINDS)
    if kinds is None:
        attention = external.get(ATTENTION)
        kinds = [FULL if attention is None or layer in attention else CONV for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - {FULL, CONV}:
        raise ConfigError(f"{KINDS}={kinds} is not supported; it can be {FULL} or {CONV} for each of {layers} layers")
    return pattern_of([kind == CONV for kind in kinds]) if CONV in kinds else None


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    return {**export_shared(model), ADJUST: False}


def export_shared(model: Mapping[str, Any]) -> dict[str, Any]:
    """What both types have."""
    config = Lfm2Config.model_validate(model)
    require_value(config, "attention_dropout", (0.0,), model_type_of(config))
    return {
        **export_rope(config),
        "head_dim": config.head_dim,
        "num_key_value_heads": config.query_groups,
        "intermediate_size": config.ffn_size,
        KINDS: [CONV if is_conv else FULL for is_conv in config.conv_layers],
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


ELSEWHERE = ("rms_norm_eps", "attention_dropout", "intermediate_size", "tie_word_embeddings")
OF_TRAINING = (
    "block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init",
    "block_dim", "conv_dim", "conv_dim_out", "block_norm_eps", "num_heads", "use_pos_enc",
)  # fmt: skip
FIELDS = (
    *(field for field in decoder_fields(tied=True, positions=128000) if field.theirs not in ELSEWHERE),
    Field("norm_eps", "norm_epsilon", float, default=1e-5),
    Field("num_key_value_heads", "num_query_groups", default=8),
    Field("head_dim", "kv_channels"),
    Field("conv_L_cache", "conv_kernel", default=3),
    Field("conv_bias", "conv_bias", default=False),
)
NOT_READ = {
    **IGNORED,
    **dict.fromkeys(OF_TRAINING, "of the code that trained the model; the class does not read it"),
    "attention_dropout": "the class has none",
    "rms_norm_eps": "norm_eps is what counts",
}
LFM2 = ConfigMap(
    architecture=DENSE,
    fields=FIELDS,
    fixed=(Fixed("hidden_act", ("silu", "swish"), written=False), *NOT_A_CHOICE),
    ignored=NOT_READ,
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *TIED, *WIDTH, ADJUST, MULTIPLIER, MULTIPLE, KINDS, ATTENTION),
    export_extra=export_extra,
)


# -- configuration: with experts ---------------------------------------------------------------------

WEIGHT_EPSILON = 1e-6
"""What the class adds to the sum of the chosen scores."""
DENSE_LAYERS, SCALE = "num_dense_layers", "routed_scaling_factor"
MOE_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "intermediate_size": 7168,
    DENSE_LAYERS: 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    SCALE: 1.0,
}


def import_with_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**MOE_DEFAULTS, **external}
    if stated.get(KINDS) is None:
        raise ConfigError(f"{KINDS} is not set; it has to be {FULL} or {CONV} for each layer")
    layers, dense = stated["num_hidden_layers"], stated[DENSE_LAYERS]
    moe = import_moe(stated, [layer >= dense for layer in range(layers)]) if dense < layers else {}
    return {
        **import_rope(external, 1000000.0),
        **moe,
        "ffn_hidden_size": stated["intermediate_size"],
        "conv_layer_pattern": import_layers(stated),
        "untie_embeddings_and_output_weights": negated(tied(external)),
    }


def import_moe(stated: Mapping[str, Any], layers: list[bool]) -> dict[str, Any]:
    require_normalized(stated)
    scale = float(stated[SCALE])
    moe = {
        "num_experts": stated["num_experts"],
        "moe_router_topk": stated["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_weight_epsilon": WEIGHT_EPSILON,
        "moe_router_enable_expert_bias": bool(stated["use_expert_bias"]),
        "moe_ffn_hidden_size": stated["moe_intermediate_size"],
        "moe_layer_freq": frequency_of(layers),
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
    }
    return {"moe": moe}


EXPRESSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_router_topk_scaling_factor",
            "moe_router_enable_expert_bias",
        ),
        ANY,
    ),
    "moe_router_score_function": ("sigmoid",),
    "moe_router_weight_epsilon": (WEIGHT_EPSILON,),
}


def export_with_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    moe = MoEOptions(Lfm2Config.model_validate(model))
    moe.require(EXPERTS, **EXPRESSED)
    return {
        **export_shared(model),
        DENSE_LAYERS: first_dense(moe, EXPERTS),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": moe.topk > 1,
        "use_expert_bias": moe["moe_router_enable_expert_bias"],
        SCALE: moe["moe_router_topk_scaling_factor"] or 1.0,
    }


LFM2_MOE = ConfigMap(
    architecture=EXPERTS,
    fields=FIELDS,
    fixed=(Fixed("hidden_act", ("silu", "swish"), written=False), *NOT_A_CHOICE),
    ignored={**NOT_READ, **MOE_IGNORED},
    import_extra=import_with_experts,
    import_extra_keys=(*ROPE_KEYS, *TIED, KINDS, *MOE_DEFAULTS),
    export_extra=export_with_experts,
)

HUGGING_FACE = HuggingFaceFamily(
    family="lfm2",
    model_types={DENSE: LFM2, EXPERTS: LFM2_MOE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={DENSE: "Lfm2ForCausalLM", EXPERTS: "Lfm2MoeForCausalLM"},
)
