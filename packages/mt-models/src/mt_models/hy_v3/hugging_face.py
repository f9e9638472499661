"""Hy3 in Hugging Face's format.

Files name the router, its bias and the shared expert otherwise than the class of transformers does, which renames them;
both are read. The layers of multi-token prediction come after the others; the class leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
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
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_bias,
    import_bias,
    renamed,
    shared_experts,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.deepseek.hugging_face import held, prediction_copies
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, SPECIAL_IDS, HuggingFaceFamily, tied_output
from mt_models.hy_v3.config import HyV3Config

KIND = "hy_v3"
NAMES = ExpertNames(
    router="mlp.router.gate.weight",
    stacked_router="mlp.router.gate.weight",
    expert_bias="mlp.expert_bias",
    shared="mlp.shared_mlp",
)
IN_MEMORY = {
    ".mlp.gate.weight": ".mlp.router.gate.weight",
    ".mlp.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.shared_experts.": ".mlp.shared_mlp.",
}
"""Names within the class of transformers -> those of files."""


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: HyV3Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in _layer_rules(config, number)]
    names = decoder_name_map(config, [*layers, *_prediction_rules(config)])
    return NameMap(names.rules, 0, names.ignored | _repeated(config))


def _layer_rules(config: HyV3Config, number: int) -> list[Rule]:
    """Rules of layer `number`; the layers of multi-token prediction are numbered after the others."""
    moe, bias = MoEOptions(config), config.attention_bias
    feed_forward = expert_rules(moe, NAMES, always_biased=True) if moe.layers[number] else feed_forward_rules()
    attention = attention_rules(config, qkv_bias=bias, output_bias=bias)
    return [
        rule.for_layer(number) for rule in (*norm_rules(PRE_NORMS), *norm_rules(QK_NORMS), *attention, *feed_forward)
    ]


def _prediction_rules(config: HyV3Config) -> list[Rule]:
    counted, rules = config.with_predicted_layers(), list[Rule]()
    for depth in range(config.mtp_num_layers):
        number = config.num_layers + depth
        ours, (layer, theirs) = f"mtp.layers.{depth}.", (name.replace("{i}", str(number)) for name in (OURS, THEIRS))
        modules = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        rules += [Same(f"{ours}{name}.weight", f"{theirs}{name}.weight") for name in modules]
        rules += [renamed(rule, layer, f"{ours}mtp_model_layer.") for rule in _layer_rules(counted, number)]
    return rules


def _repeated(config: HyV3Config) -> frozenset[str]:
    """The embedding and the LM head within layers of multi-token prediction, in whose place every program takes those
    of the model."""
    numbers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    return frozenset(f"model.layers.{n}.{part}.*" for n in numbers for part in ("embed_tokens", "shared_head"))


def spelling(config: HyV3Config, name: str) -> str:
    for theirs, published in IN_MEMORY.items():
        name = name.replace(theirs, published)
    return name


# -- configuration -----------------------------------------------------------------------------------

KINDS, DENSE = "mlp_layer_types", "first_k_dense_replace"
KEYS = (
    "num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size", "expert_hidden_dim",
    "router_scaling_factor", "intermediate_size", "num_nextn_predict_layers", "num_hidden_layers", KINDS, DENSE,
    BIAS_KEY,
)  # fmt: skip
EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias",
    ),
    ANY,
)  # fmt: skip
STD, THETA = "initializer_range", 11158840.0
SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 80,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "intermediate_size": 13312,
}
"""Defaults of the class."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **import_rope(external, default_base=THETA),
        "moe": import_moe({**SIZES, **external}),
        "mtp_num_layers": external.get("num_nextn_predict_layers") or 0,
    }


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    width, topk = external["moe_intermediate_size"], external["num_experts_per_tok"]
    if external.get("expert_hidden_dim") not in (None, width):
        raise ConfigError(
            f"expert_hidden_dim={external['expert_hidden_dim']} and moe_intermediate_size={width} contradict each "
            "other; they mean the same, so remove what is wrong"
        )
    if topk < 2:
        # The class divides the score of a single expert by itself, and training needs its gradient.
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 2 or more")
    return {
        "num_experts": external["num_experts"],
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(external["router_scaling_factor"]),
        "moe_ffn_hidden_size": width,
        # Of no shared experts the class builds one as wide as a dense layer.
        "moe_shared_expert_intermediate_size": width * external["num_shared_experts"] or external["intermediate_size"],
        "moe_layer_freq": frequency_of(import_layers(external)),
        **import_bias(external),
    }


def import_layers(external: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts. The class reads the list alone; without it the first layer is dense."""
    layers = external["num_hidden_layers"]
    if (kinds := external.get(KINDS)) is None:
        if external.get(DENSE) not in (None, 1):
            raise ConfigError(
                f"{DENSE}={external[DENSE]} without {KINDS} is not supported: the class reads the latter alone, and "
                "has one dense layer without it"
            )
        return [number > 0 for number in range(layers)]
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            f"{KINDS}={kinds} is not supported; it needs dense or sparse for each of num_hidden_layers={layers}"
        )
    return [kind == "sparse" for kind in kinds]


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HyV3Config.model_validate(model)
    moe = MoEOptions(config)
    moe.require(KIND, **EXPRESSED, moe_router_score_function=("sigmoid",))
    if moe.topk < 2:
        raise ConfigError(
            f"model.moe.moe_router_topk={moe.topk} cannot be written as a Hugging Face {KIND}; it can be 2 or more"
        )
    dense = {} if moe.first_dense is None else {DENSE: moe.first_dense}
    return {
        **export_shape(config),
        **export_rope(config),
        **export_bias(moe),
        **dense,
        KINDS: ["sparse" if experts else "dense" for experts in moe.layers],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "num_shared_experts": shared_experts(moe, KIND),
        "moe_intermediate_size": moe.ffn_size,
        "expert_hidden_dim": moe.ffn_size,
        "router_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "num_nextn_predict_layers": config.mtp_num_layers,
    }


HY_V3 = ConfigMap(
    architecture=KIND,
    fields=(
        *(entry for entry in decoder_fields(tied=False, epsilon=1e-5, positions=131072) if entry.theirs != STD),
        Field(STD, "init_method_std", import_value=float, default=0.006),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=128),
        Field("attention_bias", "attention_bias", default=False),
    ),
    fixed=(
        SILU,
        Fixed("mlp_bias", (False,)),
        Fixed("qk_norm", (True,)),
        Fixed("route_norm", (True,)),
        Fixed("moe_router_use_sigmoid", (True,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "enable_moe_fp32_combine": "the sum of two tensors is rounded once, in either dtype",
        "enable_attention_fp32_softmax": "the softmax of attention is in fp32 in every case",
        "enable_lm_head_fp32": "of other programs; the class does not read it",
        "use_grouped_mm": "which kernel multiplied the experts' matrices; model.moe.moe_grouped_gemm chooses one",
        "eod_token_id": SPECIAL_IDS,
    },
    spellings={"num_local_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *KEYS),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: HY_V3},
    name_map=name_map,
    copies=tied_output,
    spelling=spelling,
    architectures={KIND: "HYV3ForCausalLM"},
    left_out_copies=prediction_copies,
    held=held,
)
