"""MiMo-V2-Flash in Hugging Face's format.

Published files have keys of the publisher's code (`hybrid_layer_pattern`, `swa_rope_theta`, ...), which other programs
read and transformers' class does not: it has what they say as its defaults. They are written, and have to agree with
the class's own keys where they are read. Layers of multi-token prediction are `model.mtp.layers.{d}`; the class leaves
them out, so that the file itself says how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    SLIDING,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_shape,
    feed_forward_rules,
    layer_types,
    norm_rules,
    rope_table,
)
from mt_models.blocks.hugging_face_grouped_rows import GroupedRows
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_bias,
    group_scores,
    import_bias,
    import_groups,
    require_normalized,
)
from mt_models.blocks.hugging_face_windows import import_windows
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.mimo_v2_flash.config import EVERY, MiMoV2FlashConfig

KIND = "mimo_v2_flash"
SINKS = "self_attention.core_attention.softmax_offset"


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: MiMoV2FlashConfig) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in layer_rules(config, number)]
    predicted = [rule for depth in range(config.mtp_num_layers) for rule in prediction_rules(config, depth)]
    return decoder_name_map(config, [*layers, *predicted])


def layer_rules(config: MiMoV2FlashConfig, number: int) -> list[Rule]:
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    moe = expert_rules(MoEOptions(config), ExpertNames(), always_biased=True) if sparse else feed_forward_rules()
    return [rule.for_layer(number) for rule in (*norm_rules(PRE_NORMS), *attention_rules(config, number), *moe)]


def attention_rules(config: MiMoV2FlashConfig, number: int) -> list[Rule]:
    groups = config.of_layer(number).query_groups
    rows = (config.num_attention_heads // groups * config.head_dim, config.head_dim, config.v_head_dim)
    rules: list[Rule] = [
        GroupedRows(
            f"{OURS}self_attention.linear_qkv.{kind}",
            tuple(f"{THEIRS}self_attn.{name}_proj.{kind}" for name in "qkv"),
            groups=groups,
            rows=rows,
        )
        for kind in (("weight", "bias") if config.attention_bias else ("weight",))
    ]
    rules.append(Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"))
    if config.has_window(number):
        in_memory = Same(f"{OURS}{SINKS}", f"{THEIRS}self_attn.sinks")
        rules.append(Same(f"{OURS}{SINKS}", f"{THEIRS}self_attn.attention_sink_bias", others=(in_memory,)))
    return rules


PREDICTED_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_mlp_layernorm"}


def prediction_rules(config: MiMoV2FlashConfig, depth: int) -> list[Rule]:
    """Rules of one layer of multi-token prediction."""
    ours, theirs = f"mtp.layers.{depth}.", f"model.mtp.layers.{depth}."
    around = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    layer = [*norm_rules(PREDICTED_NORMS), *attention_rules(config, config.num_layers), *feed_forward_rules()]
    return [
        *(Same(f"{ours}{name}.weight", f"{theirs}{name}.weight") for name in around),
        *(moved(rule, f"{ours}mtp_model_layer.", theirs) for rule in layer),
    ]


def moved(rule: Rule, ours: str, theirs: str) -> Rule:
    """The rule of a decoder layer under other prefixes."""
    return replace(
        rule,
        ours=rule.ours.replace(OURS, ours),
        theirs=tuple(name.replace(THEIRS, theirs) for name in rule.sources),
        others=tuple(moved(other, ours, theirs) for other in rule.others),
    )


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """With the number of layers of multi-token prediction that a file has."""
    depths = {name.split(".")[3] for name in names if name.startswith("model.mtp.layers.")}
    return {**external, PREDICTED: len(depths)}


# -- configuration: layers and their positions --------------------------------------------------------

PREDICTED = "num_nextn_predict_layers"
LAYERS = 48
"""Number of layers of a file that does not say it."""
BASES = {FULL: 5000000.0, SLIDING: 10000.0}
SHARE = 0.334


def import_layers(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, kinds = external.get("num_hidden_layers", LAYERS), external.get("layer_types")
    # None: the pattern is that of the class.
    usual = [FULL if layer == 0 or (layer + 1) % EVERY == 0 else SLIDING for layer in range(layers)]
    windows = None if kinds in (None, usual) else import_windows(kinds, layers, 0)
    return {"window_attn_skip_freq": windows, **import_window(external)}


def import_window(external: Mapping[str, Any]) -> dict[str, int]:
    """`sliding_window_size` counts the positions before a query alone, and stands above the other key."""
    before = external.get("sliding_window_size")
    window = external.get("sliding_window", 129) if before is None else before + 1
    return {"sliding_window": window}


def import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    kinds = external.get("rope_parameters") or {kind: {} for kind in BASES}
    if set(kinds) - set(BASES):
        raise ConfigError(f"rope_parameters={dict(kinds)} is not supported: it has the keys {FULL} and {SLIDING}")
    (base, share), (local, local_share) = (rope_of_kind(kinds, kind) for kind in BASES)
    if share != local_share:
        raise ConfigError(
            f"rope_parameters={dict(kinds)} is not supported: partial_rotary_factor has to be the same in both"
        )
    return {"rotary_base": base, "rotary_base_local": local, "rotary_percent": share}


def rope_of_kind(kinds: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Base and rotated share of one kind of layer; of a kind without a table those of the other, or the defaults."""
    other: Mapping[str, Any] = next((table for table in kinds.values() if table), {})
    beside = {"partial_rotary_factor": other.get("partial_rotary_factor", SHARE)}
    parameters = kinds.get(kind) or beside
    table = rope_table({"rope_parameters": parameters}, BASES[kind], partial_rotary_factor=SHARE)
    if table.pop("rope_type") != "default" or set(table) - {"rope_theta", "partial_rotary_factor"}:
        raise ConfigError(
            f"rope_parameters.{kind}={dict(parameters)} is not supported: rope_type can be default, with rope_theta "
            "and partial_rotary_factor"
        )
    return float(table["rope_theta"]), float(table["partial_rotary_factor"])


# -- configuration: keys of the publisher's code ------------------------------------------------------


def published_keys(config: MiMoV2FlashConfig) -> dict[str, Any]:
    """Keys that the publisher's code reads, and transformers' class does not."""
    sparse = [False] * config.num_layers if config.moe is None else MoEOptions(config).layers
    return {
        "layernorm_epsilon": config.norm_epsilon,
        "hybrid_layer_pattern": [int(window) for window in config.layers_with_window],
        "moe_layer_freq": [int(experts) for experts in sparse],
        "rope_theta": config.rotary_base,
        "swa_rope_theta": config.rotary_base_local,
        "partial_rotary_factor": config.rotary_percent,
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.query_groups,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
    }


PUBLISHED = (
    "layernorm_epsilon", "hybrid_layer_pattern", "moe_layer_freq", "rope_theta", "swa_rope_theta",
    "partial_rotary_factor", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
)  # fmt: skip


def require_agreement(external: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ConfigError where a key of the publisher's code says something else than those of the class. values: keys
    of [model]."""
    stated = {key: value for key, value in values.items() if value is not None}
    expected = published_keys(MiMoV2FlashConfig.model_validate({"family": KIND, **stated}))
    for key in PUBLISHED:
        if (actual := external.get(key)) is not None and actual != expected[key]:
            raise ConfigError(
                f"{key}={actual} contradicts what transformers' class reads of this configuration, {expected[key]}; "
                "set layer_types, mlp_layer_types, rope_parameters, rms_norm_eps and sizes of heads as it says"
            )


# -- configuration ---------------------------------------------------------------------------------

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
}
FIELDS = (
    *(
        Field(f.theirs, f.ours, f.import_value, f.export_value, DEFAULTS.get(f.theirs, f.default))
        for f in decoder_fields(tied=False, epsilon=1e-5, positions=131072)
    ),
    Field("num_key_value_heads", "num_query_groups", default=4),
    Field("head_dim", "kv_channels", default=192),
    Field("v_head_dim", "v_head_dim", default=128),
    Field("attention_bias", "attention_bias", default=False),
)
MLP_KINDS = {"dense": False, "sparse": True}
MOE_KEYS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "mlp_layer_types", BIAS_KEY,
)  # fmt: skip
MOE_DEFAULTS: Mapping[str, Any] = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    scale = external.get("attention_value_scale", 0.707)
    values = {
        **import_layers(external),
        **import_positions(external),
        **import_moe({**MOE_DEFAULTS, **external}),
        "attention_value_scale": 1.0 if scale is None else scale,
        "mtp_num_layers": external.get(PREDICTED) or 0,
    }
    plain = {field.ours: field.import_value(external.get(field.theirs, field.default)) for field in FIELDS}
    require_agreement(external, {**plain, **values})
    return values


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = external.get("num_hidden_layers", LAYERS)
    kinds = external.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if len(kinds) != layers or set(kinds) - set(MLP_KINDS):
        raise ConfigError(
            f"mlp_layer_types={list(kinds)} is not supported; it can be dense or sparse for each of {layers} layers"
        )
    if "sparse" not in kinds:
        return {}
    require_normalized(external)
    scale = external.get("routed_scaling_factor")
    return {
        "moe": {
            "num_experts": external["n_routed_experts"],
            "moe_router_topk": external["num_experts_per_tok"],
            "moe_ffn_hidden_size": external["moe_intermediate_size"],
            "moe_layer_freq": frequency_of([MLP_KINDS[kind] for kind in kinds]),
            "moe_router_score_function": "sigmoid",
            # The class has no balance loss.
            "moe_router_load_balancing_type": ["none"],
            **({"moe_router_topk_scaling_factor": float(scale)} if scale not in (None, 1.0) else {}),
            **import_bias(external),
            **import_groups(external, score_topk=2),
        }
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MiMoV2FlashConfig.model_validate(model)
    predicted = {PREDICTED: config.mtp_num_layers} if config.mtp_num_layers else {}
    return {
        **export_shape(config),
        **export_moe(config),
        **published_keys(config),
        **predicted,
        "layer_types": layer_types(config),
        "sliding_window_size": config.sliding_window - 1,
        "attention_value_scale": config.attention_value_scale,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": config.rotary_percent}
            for kind, base in ((FULL, config.rotary_base), (SLIDING, config.rotary_base_local))
        },
    }


EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    ),
    ANY,
)  # fmt: skip


def export_moe(config: MiMoV2FlashConfig) -> dict[str, Any]:
    if config.moe is None:
        return {"mlp_layer_types": ["dense"] * config.num_layers}
    moe = MoEOptions(config)
    scores = group_scores(moe, 2)
    moe.require(KIND, **EXPRESSED, moe_router_score_function=("sigmoid",), moe_router_group_score_topk=scores)
    return {
        **export_bias(moe),
        "mlp_layer_types": ["sparse" if experts else "dense" for experts in moe.layers],
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
        "norm_topk_prob": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
    }


MIMO = ConfigMap(
    architecture=KIND,
    fields=FIELDS,
    fixed=(
        SILU,
        Fixed("add_swa_attention_sink_bias", (True,)),
        Fixed("add_full_attention_sink_bias", (False,)),
        Fixed("scoring_func", ("sigmoid",)),
        Fixed("topk_method", ("noaux_tc",)),
        Fixed("n_shared_experts", (None, 0)),
        Fixed("hybrid_block_size", (None,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "attention_chunk_size": "of the publisher's code, which reads sliding_window_size",
    },
    import_extra=import_extra,
    import_extra_keys=(
        *MOE_KEYS, *PUBLISHED, PREDICTED, "layer_types", "rope_parameters", "sliding_window", "sliding_window_size",
        "attention_value_scale",
    ),
    export_extra=export_extra,
    spellings={"num_local_experts": "n_routed_experts"},
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: MIMO},
    name_map=name_map,
    copies=tied_output,
    architectures={KIND: "MiMoV2FlashForCausalLM"},
    held=held,
)
