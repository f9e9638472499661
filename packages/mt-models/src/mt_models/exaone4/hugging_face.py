"""EXAONE 4 and K-EXAONE in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    BRANCH_NORMS,
    FULL,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    THEIRS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    feed_forward_rules,
    import_pattern,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    ExpertNames,
    export_bias,
    group_scores,
    import_bias,
    import_groups,
    mixed_feed_forward_rules,
    require_normalized,
    shared_experts,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.exaone4.config import Exaone4Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

DENSE, EXPERTS = "exaone4", "exaone_moe"
PATTERN = "sliding_window_pattern"
NAMES = ExpertNames(expert_bias="mlp.e_score_correction_bias")
COUNT = "num_nextn_predict_layers"
PREDICTION = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "final_layernorm": "norm",
}
"""Parts of the layer of multi-token prediction around the layer itself -> their names in files."""


def name_map(config: Exaone4Config) -> NameMap:
    heads = [*norm_rules(QK_NORMS), *attention_rules(config)]
    if config.moe is None:
        return decoder_name_map(config, [*norm_rules(BRANCH_NORMS), *heads, *feed_forward_rules()])
    blocks = mixed_feed_forward_rules(config, NAMES, always_biased=True)
    names = decoder_name_map(config, [*norm_rules(PRE_NORMS), *heads, *blocks])
    return NameMap([*names.rules, *(_prediction_rules(config) if config.mtp_num_layers else ())], 0, names.ignored)


def _prediction_rules(config: Exaone4Config) -> list[Rule]:
    layer = (*norm_rules(PRE_NORMS), *norm_rules(QK_NORMS), *attention_rules(config), *feed_forward_rules())
    return [
        *(Same(f"mtp.layers.0.{ours}.weight", f"mtp.{theirs}.weight") for ours, theirs in PREDICTION.items()),
        *(_moved(rule, "mtp.layers.0.mtp_model_layer.", "mtp.layers.0.") for rule in layer),
    ]


def _moved(rule: Rule, ours: str, theirs: str) -> Rule:
    """The rule of a layer under other prefixes."""
    sources = tuple(theirs + name.removeprefix(THEIRS) for name in rule.sources)
    return replace(rule, ours=ours + rule.ours.removeprefix(OURS), theirs=sources)


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """With the layer of multi-token prediction where a file has its tensors, and without it where it has not."""
    if external.get("model_type") != EXPERTS:
        return external
    return {**external, COUNT: int(any(name.startswith("mtp.") for name in names))}


def model_type_of(config: Exaone4Config) -> str:
    return DENSE if config.moe is None else EXPERTS


def import_windows(external: Mapping[str, Any]) -> dict[str, Any]:
    """The window and every how many layers there is none, from the list of kinds, a number or a pattern "LLLG"."""
    kinds, layers = external.get("layer_types"), external.get("num_hidden_layers", 32)
    window = external.get("sliding_window", 4096)
    if kinds is not None and len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries; it needs one for each of num_hidden_layers={layers}")
    if window is None:
        if set(kinds or ()) - {FULL}:
            raise ConfigError(f"layer_types={kinds} is not supported with sliding_window=None; all can be {FULL}")
        return {}
    if kinds is not None:
        return {"sliding_window": window, PATTERN: import_pattern({"layer_types": kinds}, 4)}
    period = external.get(PATTERN, 4)
    if isinstance(period, str):
        period = _period(period)
    if not period:
        raise ConfigError(f"{PATTERN}={period!r} is not supported with sliding_window={window}; it can be 1 or more")
    return {"sliding_window": window, PATTERN: period}


def _period(pattern: str) -> int:
    """The length of a pattern of local layers and a global one at its end."""
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise ConfigError(f"{PATTERN}={pattern!r} is not supported; it can be L for local layers, then one G")
    return len(pattern)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return {**import_rope(external), **import_windows(external)}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Exaone4Config.model_validate(model)
    period = config.sliding_window_pattern
    # Another order of layers is in layer_types alone.
    pattern = {PATTERN: period} if config.sliding_window is not None and isinstance(period, int) else {}
    return {
        **export_shape(config),
        **export_rope(config),
        **pattern,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


FIELDS = (
    *decoder_fields(tied=False, epsilon=1e-5, positions=2048),
    Field("num_key_value_heads", "num_query_groups", default=32),
    Field("head_dim", "kv_channels"),
)
FIXED = (Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE)
WINDOW_KEYS = ("layer_types", "sliding_window", PATTERN)
EXAONE4 = ConfigMap(
    architecture=DENSE,
    fields=FIELDS,
    fixed=FIXED,
    ignored={**IGNORED, "layer_norm_epsilon": "of EXAONE 3; rms_norm_eps is what counts"},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *WINDOW_KEYS),
    export_extra=export_extra,
)


# -- configuration: K-EXAONE -------------------------------------------------------------------------

KINDS, LISTED, DENSE_LAYERS = "mlp_layer_types", "is_moe_layer", "first_k_dense_replace"
MOE_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    DENSE_LAYERS: 1,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def import_with_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**MOE_DEFAULTS, **external}
    require_normalized(stated)
    scale, width = float(stated["routed_scaling_factor"]), stated["moe_intermediate_size"]
    moe = {
        "num_experts": stated["num_experts"],
        "moe_router_topk": stated["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * stated["num_shared_experts"],
        "moe_layer_freq": frequency_of(import_layers(stated)),
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
        **import_bias(external),
        **import_groups(external, score_topk=2),
    }
    return {**import_extra(external), "moe": moe}


def import_layers(stated: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts."""
    number, kinds = stated["num_hidden_layers"], stated.get(KINDS)
    if kinds is None:
        layers = [layer >= stated[DENSE_LAYERS] for layer in range(number)]
    elif len(kinds) != number or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(f"{KINDS}={kinds} is not supported; it can be dense or sparse for each of {number} layers")
    else:
        layers = [kind == "sparse" for kind in kinds]
    if not any(layers):
        raise ConfigError(
            f"{DENSE_LAYERS}={stated[DENSE_LAYERS]} and {KINDS}={kinds} leave no layer with experts; at least one"
        )
    if stated.get(LISTED) not in (None, layers):
        raise ConfigError(f"{LISTED}={stated[LISTED]} contradicts {DENSE_LAYERS} or {KINDS}; remove what is wrong")
    return layers


EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias",
    ),
    ANY,
)  # fmt: skip


def export_with_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Exaone4Config.model_validate(model)
    if config.sliding_window is None:
        raise ConfigError(
            f"model.sliding_window=null cannot be written as a Hugging Face {EXPERTS}, whose layers without a window "
            "have no positions"
        )
    moe = MoEOptions(config)
    scores = group_scores(moe, 2)
    moe.require(EXPERTS, **EXPRESSED, moe_router_score_function=("sigmoid",), moe_router_group_score_topk=scores)
    return {
        **export_extra(model),
        **export_bias(moe),
        KINDS: ["sparse" if has_experts else "dense" for has_experts in moe.layers],
        DENSE_LAYERS: moe.layers.index(True),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "num_shared_experts": shared_experts(moe, EXPERTS),
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
    }


EXAONE_MOE = ConfigMap(
    architecture=EXPERTS,
    fields=(*FIELDS, Field(COUNT, "mtp_num_layers", import_value=lambda count: int(count or 0), default=0)),
    fixed=(
        *FIXED,
        Fixed("mtp_layer_types", (None, [], [FULL]), written=False),
        Fixed("mtp_sliding_windows", (None, [], [0]), written=False),
        Fixed("scoring_func", ("sigmoid",), written=False),
        Fixed("topk_method", ("noaux_tc",), written=False),
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "first_last_k_dense_replace": "of earlier code; is_moe_layer, mlp_layer_types or first_k_dense_replace say it",
        "mtp_loss_scaling_factor": "of the loss in the publisher's training; model.mtp_loss_scaling_factor sets it",
    },
    import_extra=import_with_experts,
    import_extra_keys=(*ROPE_KEYS, *WINDOW_KEYS, *MOE_DEFAULTS, KINDS, LISTED, "n_group", "topk_group", BIAS_KEY),
    export_extra=export_with_experts,
    spellings={"n_routed_experts": "num_experts", "num_local_experts": "num_experts"}
    | {"n_shared_experts": "num_shared_experts"},
)

HUGGING_FACE = HuggingFaceFamily(
    family="exaone4",
    model_types={DENSE: EXAONE4, EXPERTS: EXAONE_MOE},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    held=held,
    architectures={DENSE: "Exaone4ForCausalLM", EXPERTS: "ExaoneMoeForCausalLM"},
)
