"""DeepSeek-V2 and V3 in Hugging Face's format.

The layers of multi-token prediction stand behind the others, with further copies of the embedding and the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
    rope_to_ours,
    rope_to_theirs,
)
from mt_models.blocks.hugging_face_mixture import MIXTURE_IGNORED, SILU, ExpertNames, expert_rules
from mt_models.blocks.mixture import ANY, Mixture, frequency_of
from mt_models.deepseek.config import DeepseekConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

NAMES = ExpertNames()
NORM_EPSILON = 1e-6
"""Of the norms of latents there, whatever rms_norm_eps says."""


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: DeepseekConfig) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in layer_rules(config, number)]
    return decoder_name_map(config, [*layers, *prediction_rules(config)])


def layer_rules(config: DeepseekConfig, number: int) -> list[Rule]:
    """Of layer `number`; those of multi-token prediction are counted behind the others."""
    sparse = config.moe is not None and Mixture(config).layers[number]
    feed_forward = expert_rules(Mixture(config), NAMES) if sparse else feed_forward_rules()
    return [rule.for_layer(number) for rule in (*norm_rules(PRE_NORMS), *latent_rules(config), *feed_forward)]


def latent_rules(config: DeepseekConfig) -> list[Rule]:
    names = {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    if config.q_lora_rank is None:
        names["linear_q_proj"] = "q_proj"
    else:
        names |= {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
    return norm_rules({f"self_attention.{ours}": f"self_attn.{theirs}" for ours, theirs in names.items()})


def prediction_rules(config: DeepseekConfig) -> list[Rule]:
    counted = config.with_predicted_layers()
    rules: list[Rule] = []
    for depth in range(config.mtp_num_layers):
        number = config.num_layers + depth
        ours, theirs = f"mtp.layers.{depth}.", THEIRS.replace("{i}", str(number))
        for own, external in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_layernorm", "shared_head.norm"),
        ):
            rules.append(Same(f"{ours}{own}.weight", f"{theirs}{external}.weight"))
        prefix = OURS.replace("{i}", str(number))
        rules += [_renamed(rule, prefix, f"{ours}mtp_model_layer.") for rule in layer_rules(counted, number)]
    return rules


def _renamed(rule: Rule, prefix: str, instead: str) -> Rule:
    return replace(rule, ours=instead + rule.ours.removeprefix(prefix))


def copies(config: DeepseekConfig) -> dict[str, str]:
    found = dict(tied_output(config))
    output = "lm_head.weight" if config.untie_embeddings_and_output_weights else "model.embed_tokens.weight"
    for number in range(config.num_layers, config.num_layers + config.mtp_num_layers):
        found[f"model.layers.{number}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"model.layers.{number}.shared_head.head.weight"] = output
    return found


# -- configuration -----------------------------------------------------------------------------------

MOE_KEYS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "topk_method", "routed_scaling_factor", "first_k_dense_replace", "aux_loss_alpha", "seq_aux",
    "router_aux_loss_coef", "num_nextn_predict_layers", "num_mtp_layers",
)  # fmt: skip
ATTENTION_KEYS = ("num_key_value_heads", "head_dim", "qk_head_dim")


def model_type_of(config: DeepseekConfig) -> str:
    if config.moe is None:
        raise ConfigError("model.moe is not set; a Hugging Face deepseek_v2 or deepseek_v3 is a mixture of experts")
    return "deepseek_v3" if Mixture(config)["moe_router_score_function"] == "sigmoid" else "deepseek_v2"


def mixture_to_ours(external: Mapping[str, Any], *, dense: int, shared: int, layers: int) -> dict[str, Any]:
    """Options of model.moe of both generations; dense, shared, layers: defaults there."""
    layers = external.get("num_hidden_layers", layers)
    dense = min(external.get("first_k_dense_replace", dense), layers)
    ffn = external["moe_intermediate_size"]
    shared_experts = external.get("n_shared_experts", shared)
    balance = "seq_aux_loss" if external.get("seq_aux", True) else "aux_loss"
    scale = float(external.get("routed_scaling_factor", 1.0))
    return {
        "num_experts": external["n_routed_experts"],
        "moe_router_topk": external["num_experts_per_tok"],
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": frequency_of([False] * dense + [True] * (layers - dense)),
        "moe_router_load_balancing_type": [balance],
        "moe_aux_loss_coeff": [float(external.get("aux_loss_alpha", 0.001))],
        **({"moe_shared_expert_intermediate_size": ffn * shared_experts} if shared_experts else {}),
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
    }


def groups_to_ours(external: Mapping[str, Any], score_topk: int) -> dict[str, int]:
    if external.get("n_group") in (None, 1):
        return {}
    return {
        "moe_router_num_groups": external["n_group"],
        "moe_router_group_topk": external["topk_group"],
        "moe_router_group_score_topk": score_topk,
    }


def _shared_to_ours(external: Mapping[str, Any]) -> dict[str, Any]:
    heads, groups = external["num_attention_heads"], external.get("num_key_value_heads")
    if groups not in (None, heads):
        raise ConfigError(f"num_key_value_heads={groups} is not supported; it can be num_attention_heads={heads}")
    if (epsilon := float(external.get("rms_norm_eps", NORM_EPSILON))) != NORM_EPSILON:
        raise ConfigError(f"rms_norm_eps={epsilon} is not supported: norms of latents have {NORM_EPSILON} there")
    if external.get("topk_method") not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise ConfigError(f"topk_method={external['topk_method']!r} is not supported")
    return rope_to_ours(external)


def v2_to_ours(external: Mapping[str, Any]) -> dict[str, Any]:
    moe = mixture_to_ours(external, dense=0, shared=2, layers=32)
    moe["moe_router_pre_softmax"] = True
    if external.get("topk_method") == "group_limited_greedy":
        moe |= groups_to_ours(external, score_topk=1)
    return {**_shared_to_ours(external), "moe": moe}


def v3_to_ours(external: Mapping[str, Any]) -> dict[str, Any]:
    moe = mixture_to_ours(external, dense=3, shared=1, layers=61)
    moe |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    moe |= groups_to_ours({"n_group": 8, "topk_group": 4, **external}, score_topk=2)
    predicted = external.get("num_nextn_predict_layers", external.get("num_mtp_layers", 0))
    return {**_shared_to_ours(external), "moe": moe, "mtp_num_layers": predicted}


def _mixture_to_theirs(config: DeepseekConfig, mixture: Mixture) -> dict[str, Any]:
    if mixture.first_dense is None:
        raise ConfigError(
            f"model.moe.moe_layer_freq={mixture['moe_layer_freq']} cannot be written as a Hugging Face DeepSeek, whose "
            "dense layers come first"
        )
    shared, uneven = divmod(mixture.shared_size or 0, mixture.ffn_size)
    if uneven or not shared:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size={mixture.shared_size} cannot be written as a Hugging Face "
            f"DeepSeek; it can be a multiple of the experts' width {mixture.ffn_size}"
        )
    if config.norm_epsilon != NORM_EPSILON:
        raise ConfigError(
            f"model.norm_epsilon={config.norm_epsilon} cannot be written as a Hugging Face DeepSeek, whose norms of "
            f"latents have {NORM_EPSILON}"
        )
    types = mixture.options.get("moe_router_load_balancing_type", ["aux_loss"])
    coefficients = mixture.options.get("moe_aux_loss_coeff") or [0.01]
    return {
        **rope_to_theirs(config),
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "n_routed_experts": mixture.num_experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": mixture.topk,
        "moe_intermediate_size": mixture.ffn_size,
        "first_k_dense_replace": mixture.first_dense,
        "routed_scaling_factor": mixture["moe_router_topk_scaling_factor"] or 1.0,
        "aux_loss_alpha": coefficients[0] if types[0].endswith("loss") else 0.0,
        "seq_aux": types[0] == "seq_aux_loss",
    }


EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size",
    ),
    ANY,
)  # fmt: skip


def _group_scores(mixture: Mixture, fixed: int) -> tuple[int | None, ...]:
    """Values of moe_router_group_score_topk that mean the number which the class has fixed, or no groups."""
    if mixture["moe_router_num_groups"] is None:
        return (None,)
    by_default = mixture["moe_router_topk"] // mixture["moe_router_group_topk"]
    return (fixed, None) if by_default == fixed else (fixed,)


def v2_to_theirs(model: Mapping[str, Any]) -> dict[str, Any]:
    config = DeepseekConfig.model_validate(model)
    mixture = Mixture(config)
    grouped = mixture["moe_router_num_groups"] is not None
    scores = _group_scores(mixture, 1)
    mixture.require("deepseek_v2", **EXPRESSED, moe_router_pre_softmax=(True,), moe_router_group_score_topk=scores)
    if config.mtp_num_layers:
        raise ConfigError(
            f"model.mtp_num_layers={config.mtp_num_layers} cannot be written as a Hugging Face deepseek_v2"
        )
    return {
        **_mixture_to_theirs(config, mixture),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": mixture["moe_router_num_groups"],
        "topk_group": mixture["moe_router_group_topk"],
    }


def v3_to_theirs(model: Mapping[str, Any]) -> dict[str, Any]:
    config = DeepseekConfig.model_validate(model)
    mixture = Mixture(config)
    scores = _group_scores(mixture, 2)
    mixture.require(
        "deepseek_v3",
        **EXPRESSED,
        moe_router_score_function=("sigmoid",),
        moe_router_enable_expert_bias=(True,),
        moe_router_group_score_topk=scores,
    )
    return {
        **_mixture_to_theirs(config, mixture),
        "topk_method": "noaux_tc",
        "n_group": mixture["moe_router_num_groups"] or 1,
        "topk_group": mixture["moe_router_group_topk"] or 1,
        "num_nextn_predict_layers": config.mtp_num_layers,
    }


FIELDS = (
    Field("q_lora_rank", "q_lora_rank"),
    Field("kv_lora_rank", "kv_lora_rank", default=512),
    Field("qk_nope_head_dim", "qk_head_dim", default=128),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim", default=64),
    Field("v_head_dim", "v_head_dim", default=128),
)
FIXED = (SILU, Fixed("attention_bias", (False,)), Fixed("moe_layer_freq", (1,)), *NOT_A_CHOICE)
DERIVED = {
    **dict.fromkeys(("head_dim", "qk_head_dim"), "the sum of other fields, or one of them"),
    "ep_size": "how experts were divided over ranks; parallel.expert_model_parallel_size says so",
    "router_aux_loss_coef": "not read by the Python class; aux_loss_alpha is the coefficient",
}
V2 = ConfigMap(
    architecture="deepseek_v2",
    fields=(*decoder_fields(tied=False, positions=2048), *FIELDS),
    fixed=(
        *FIXED,
        Fixed("mlp_bias", (False,)),
        Fixed("norm_topk_prob", (False,)),
        Fixed("scoring_func", ("softmax",)),
    ),
    ignored={**IGNORED, **MIXTURE_IGNORED, **DERIVED},
    further=v2_to_ours,
    further_keys=(*ROPE_KEYS, *MOE_KEYS, *ATTENTION_KEYS),
    further_back=v2_to_theirs,
)
V3 = ConfigMap(
    architecture="deepseek_v3",
    fields=(*decoder_fields(tied=False, positions=4096), *FIELDS),
    fixed=(
        *FIXED,
        Fixed("norm_topk_prob", (True,)),
        Fixed("scoring_func", ("sigmoid",)),
        Fixed("rope_interleave", (True,)),
    ),
    ignored={**IGNORED, **MIXTURE_IGNORED, **DERIVED},
    further=v3_to_ours,
    further_keys=(*ROPE_KEYS, *MOE_KEYS, *ATTENTION_KEYS),
    further_back=v3_to_theirs,
)

HUGGING_FACE = HuggingFaceFamily(
    family="deepseek",
    model_types={"deepseek_v2": V2, "deepseek_v3": V3},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=copies,
    architectures={"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"},
)
