"""DeepSeek-V2 and V3, and Kimi K2, in Hugging Face's format.

Kimi K2 is a DeepSeek-V3 of other sizes under a type of its own, `kimi_k2`, which is read and written as `deepseek_v3`.
Of Kimi K2.5 and K2.6 (`kimi_k25`), whose files hold the decoder beside an image tower, the decoder is read.

The MTP layers come after the others, with further copies of the embedding and the LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    export_rope,
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
    first_dense,
    group_scores,
    import_bias,
    import_groups,
    renamed,
    require_normalized,
    shared_experts,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEConfigLike, MoEOptions, frequency_of
from mt_models.blocks.prediction_config import PredictionKeys
from mt_models.deepseek.config import DeepseekConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output

NAMES = ExpertNames()
NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents in Hugging Face's classes, independent of rms_norm_eps."""


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: DeepseekConfig) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in layer_rules(config, number)]
    names = decoder_name_map(config, [*layers, *prediction_rules(config)])
    return NameMap(names.rules, 0, names.ignored | TOWER)


TOWER = frozenset(f"{prefix}{part}.*" for prefix in ("", "model.") for part in ("vision_tower", "mm_projector"))
"""Tensors of the image tower of Kimi K2.5, which this family does not have."""
WITHIN = {
    "language_model.model.blocks.": "model.layers.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of the decoder in files of Kimi K2.5 (`blocks` where transformers wrote them, which renames layers of the
tower), and in the memory of transformers -> those of the decoder alone."""


def spelling(config: DeepseekConfig, name: str) -> str:
    for prefix, instead in WITHIN.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def layer_rules(config: DeepseekConfig, number: int) -> list[Rule]:
    """Rules of layer `number`; MTP layers are numbered after the others."""
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    # The class of V3 always has e_score_correction_bias, that of V2 never.
    biased = model_type_of(config) == "deepseek_v3"
    feed_forward = expert_rules(MoEOptions(config), NAMES, always_biased=biased) if sparse else feed_forward_rules()
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
        # Rows need no permutation: plain and rotated channels of a head, and interleaved pairs, stand as in Megatron.
        names |= {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
    return norm_rules({f"self_attention.{ours}": f"self_attn.{theirs}" for ours, theirs in names.items()})


def prediction_rules(
    config: PredictionKeys,
    rules_of_layer: Callable[[Any, int], list[Rule]] = layer_rules,
    *,
    final_norm: str = "shared_head.norm",
) -> list[Rule]:
    """Rules of the layers of multi-token prediction. rules_of_layer: makes those of a decoder layer from the
    configuration and its number. final_norm: the name in files of the norm before the LM head."""
    counted = config.with_predicted_layers()
    rules: list[Rule] = []
    for depth in range(config.mtp_num_layers):
        # Layer 61 of V3's file is the first prediction layer: a whole decoder
        # layer, two norms, a projection and a head.
        number = config.num_layers + depth
        ours, theirs = f"mtp.layers.{depth}.", THEIRS.replace("{i}", str(number))
        for canonical, external in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_layernorm", final_norm),
        ):
            rules.append(Same(f"{ours}{canonical}.weight", f"{theirs}{external}.weight"))
        # layer_rules names it as a decoder layer; only the canonical side is moved to mtp.
        prefix = OURS.replace("{i}", str(number))
        rules += [renamed(rule, prefix, f"{ours}mtp_model_layer.") for rule in rules_of_layer(counted, number)]
    return rules


def unread_prediction(config: PredictionKeys) -> frozenset[str]:
    """Tensors of layers behind the last: all without multi-token prediction, else the embedding and the LM head, in
    whose place every program takes those of the model."""
    if not config.mtp_num_layers:
        return frozenset({f"model.layers.{config.num_layers}.*"})
    numbers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    return frozenset(f"model.layers.{n}.{part}.*" for n in numbers for part in ("embed_tokens", "shared_head.head"))


def copies(config: DeepseekConfig) -> dict[str, str]:
    return {**tied_output(config), **prediction_copies(config)}


def prediction_copies(config: PredictionKeys) -> dict[str, str]:
    """Each prediction layer in the file repeats embedding and head, which the model has once."""
    repeated: dict[str, str] = {}
    output = "lm_head.weight" if config.untie_embeddings_and_output_weights else "model.embed_tokens.weight"
    for number in range(config.num_layers, config.num_layers + config.mtp_num_layers):
        repeated[f"model.layers.{number}.embed_tokens.weight"] = "model.embed_tokens.weight"
        repeated[f"model.layers.{number}.shared_head.head.weight"] = output
    return repeated


# -- configuration -----------------------------------------------------------------------------------

MOE_KEYS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "topk_method", "routed_scaling_factor", "first_k_dense_replace", "aux_loss_alpha", "seq_aux",
    "router_aux_loss_coef", "num_nextn_predict_layers",
)  # fmt: skip
ATTENTION_KEYS = ("num_key_value_heads", "head_dim")


def model_type_of(config: DeepseekConfig) -> str:
    """A model without MoE layers is a deepseek_v3 with all layers before its first MoE layer."""
    if config.moe is None:
        return "deepseek_v3"
    return "deepseek_v3" if MoEOptions(config)["moe_router_score_function"] == "sigmoid" else "deepseek_v2"


def import_moe(external: Mapping[str, Any], *, dense: int, shared: int, layers: int, scale: float) -> dict[str, Any]:
    """Options of model.moe for both versions; dense, shared, layers, scale: defaults in Hugging Face's format."""
    sparse = sparse_layers(external, dense=dense, layers=layers)
    ffn = external["moe_intermediate_size"]
    shared_experts = external.get("n_shared_experts", shared)
    # seq_aux: balance within each sequence, Megatron's seq_aux_loss.
    balance = "seq_aux_loss" if external.get("seq_aux", True) else "aux_loss"
    scale = float(external.get("routed_scaling_factor", scale))
    return {
        "num_experts": external["n_routed_experts"],
        "moe_router_topk": external["num_experts_per_tok"],
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": frequency_of(sparse),
        "moe_router_load_balancing_type": [balance],
        "moe_aux_loss_coeff": [float(external.get("aux_loss_alpha", 0.001))],
        **({"moe_shared_expert_intermediate_size": ffn * shared_experts} if shared_experts else {}),
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
    }


def import_shared(external: Mapping[str, Any]) -> dict[str, Any]:
    heads, groups = external["num_attention_heads"], external.get("num_key_value_heads")
    if groups not in (None, heads):
        raise ConfigError(f"num_key_value_heads={groups} is not supported; it can be num_attention_heads={heads}")
    if external.get("topk_method") not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise ConfigError(f"topk_method={external['topk_method']!r} is not supported")
    # Norms of latents are built without the configuration's epsilon there.
    differs = float(external.get("rms_norm_eps", NORM_EPSILON)) != NORM_EPSILON
    return {**import_rope(external), **({"latent_norm_epsilon": NORM_EPSILON} if differs else {})}


def _require_rotated(external: Mapping[str, Any]) -> None:
    """Raises ConfigError unless head_dim, from which the class of V3 computes frequencies, is what is rotated."""
    rotated = external.get("qk_rope_head_dim", 64)
    if external.get("head_dim") not in (None, rotated):
        raise ConfigError(f"head_dim={external['head_dim']!r} is not supported; it can be qk_rope_head_dim={rotated}")


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none: its class leaves them out and keeps the count."""
    if isinstance(text := external.get("text_config"), Mapping):
        return {**external, "text_config": held(text, [name.removeprefix("language_model.") for name in names])}
    layers = f"model.layers.{external.get('num_hidden_layers', 61)}."
    counts = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if external.get(key)]
    if not counts or any(name.startswith(layers) for name in names):
        return external
    return {**external, **dict.fromkeys(counts, 0)}


KINDS = "mlp_layer_types"
"""The feed-forward of each layer, in newer classes; in place of `first_k_dense_replace`."""


def sparse_layers(external: Mapping[str, Any], *, dense: int, layers: int) -> list[bool]:
    """For each layer whether it has experts, by `mlp_layer_types`, else by `first_k_dense_replace`. dense, layers:
    defaults of the latter and of `num_hidden_layers`. Raises ConfigError for other kinds or another number of them, and
    where a file has both keys and they differ."""
    layers = external.get("num_hidden_layers", layers)
    kinds, stated = external.get(KINDS), external.get("first_k_dense_replace")
    # Files of small models may have a number above their layers: all of them are dense.
    counted = [number >= (dense if stated is None else stated) for number in range(layers)]
    if kinds is None:
        return counted
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            f"{KINDS}={list(kinds)} is not supported; it needs dense or sparse for each of num_hidden_layers={layers}"
        )
    sparse = [kind == "sparse" for kind in kinds]
    if stated is not None and sparse != counted:
        raise ConfigError(f"{KINDS}={list(kinds)} and first_k_dense_replace={stated} contradict each other")
    return sparse


def export_kinds(config: MoEConfigLike) -> dict[str, Any]:
    """`mlp_layer_types`, and the number of dense layers where they come first."""
    sparse = [False] * config.num_layers if config.moe is None else MoEOptions(config).layers
    counted = {"first_k_dense_replace": sparse.count(False)} if sparse == sorted(sparse) else {}
    return {**counted, KINDS: ["sparse" if experts else "dense" for experts in sparse]}


def v2_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    if not any(sparse_layers(external, dense=0, layers=32)):
        return import_shared(external)
    moe = import_moe(external, dense=0, shared=2, layers=32, scale=1.0)
    # V2 takes the softmax over all experts and does not renormalize the chosen ones.
    moe["moe_router_pre_softmax"] = True
    if external.get("topk_method") == "group_limited_greedy":
        # V2: a group's score is its best expert's; V3: the sum of its best two.
        moe |= import_groups(external, score_topk=1)
    return {**import_shared(external), "moe": moe}


def v3_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    _require_rotated(external)
    values = {**import_shared(external), "mtp_num_layers": external.get("num_nextn_predict_layers", 0)}
    if not any(sparse_layers(external, dense=3, layers=61)):
        return values
    require_normalized(external)
    moe = import_moe(external, dense=3, shared=1, layers=61, scale=2.5)
    moe |= {"moe_router_score_function": "sigmoid", **import_bias(external)}
    # Defaults of the class for what a file leaves out, given before the file's own values
    moe |= import_groups({"n_group": 8, "topk_group": 4, **external}, score_topk=2)
    return {**values, "moe": moe}


def export_shared(config: DeepseekConfig) -> dict[str, Any]:
    """Fields present with and without MoE layers."""
    require_value(config, "normalization", ("RMSNorm",), model_type_of(config))
    if config.latent_epsilon != NORM_EPSILON:
        key = "norm_epsilon" if config.latent_norm_epsilon is None else "latent_norm_epsilon"
        raise ConfigError(
            f"model.{key}={config.latent_epsilon} cannot be written as a Hugging Face DeepSeek, whose norms of latents "
            f"have {NORM_EPSILON}; set model.latent_norm_epsilon to it"
        )
    return {
        **export_rope(config),
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
    }


def export_moe(config: DeepseekConfig, moe: MoEOptions, *, listed: bool = False) -> dict[str, Any]:
    """listed: whether the class has `mlp_layer_types`, which says what a number of dense layers cannot."""
    kind = model_type_of(config)
    kinds = export_kinds(config) if listed else {"first_k_dense_replace": first_dense(moe, kind)}
    shared = shared_experts(moe, kind)
    types = moe.options.get("moe_router_load_balancing_type", ["aux_loss"])
    coefficients = moe.options.get("moe_aux_loss_coeff") or [0.01]
    return {
        **export_shared(config),
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        **kinds,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
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


def v2_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = DeepseekConfig.model_validate(model)
    moe = MoEOptions(config)
    grouped = moe["moe_router_num_groups"] is not None
    scores = group_scores(moe, 1)
    moe.require("deepseek_v2", **EXPRESSED, moe_router_pre_softmax=(True,), moe_router_group_score_topk=scores)
    if config.mtp_num_layers:
        raise ConfigError(
            f"model.mtp_num_layers={config.mtp_num_layers} cannot be written as a Hugging Face deepseek_v2"
        )
    return {
        **export_moe(config, moe),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": moe["moe_router_num_groups"],
        "topk_group": moe["moe_router_group_topk"],
    }


def v3_export_extra(model: Mapping[str, Any], kind: str = "deepseek_v3", *, listed: bool = False) -> dict[str, Any]:
    """kind: the model_type that is written, for messages. listed: see export_moe."""
    config = DeepseekConfig.model_validate(model)
    if config.moe is None:
        counted = config.num_layers + config.mtp_num_layers  # the layers of prediction are dense, too
        return {
            **export_shared(config),
            "first_k_dense_replace": counted,
            "num_nextn_predict_layers": config.mtp_num_layers,
        }
    moe = MoEOptions(config)
    scores = group_scores(moe, 2)
    moe.require(
        kind,
        **EXPRESSED,
        moe_router_score_function=("sigmoid",),
        moe_router_enable_expert_bias=ANY,
        moe_router_group_score_topk=scores,
    )
    return {
        **export_moe(config, moe, listed=listed),
        **export_bias(moe),
        "norm_topk_prob": moe.topk > 1,
        "topk_method": "noaux_tc",
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
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
SPELLINGS = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
DERIVED = {
    "qk_head_dim": "the sum of other fields",
    "ep_size": "how experts were sharded over ranks; parallel.expert_model_parallel_size says so",
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
    ignored={**IGNORED, **MOE_IGNORED, **DERIVED},
    import_extra=v2_import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, *ATTENTION_KEYS),
    export_extra=v2_export_extra,
    spellings=SPELLINGS,
)
V3 = ConfigMap(
    architecture="deepseek_v3",
    fields=(*decoder_fields(tied=False, positions=4096), *FIELDS),
    fixed=(
        *FIXED,
        Fixed("scoring_func", ("sigmoid",)),
        Fixed("rope_interleave", (True,)),
    ),
    ignored={**IGNORED, **MOE_IGNORED, **DERIVED},
    import_extra=v3_import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, *ATTENTION_KEYS, "norm_topk_prob", BIAS_KEY),
    export_extra=v3_export_extra,
    spellings=SPELLINGS,
)

KIMI_TOWER_KEYS = (
    "projection_hidden_size", "projection_layer_norm_eps", "ignore_index", "use_unified_vision_chunk",
    "video_placeholder",
)  # fmt: skip
KIMI_PLACEHOLDERS = {"image_token_id": 163605, "video_token_id": 163840}
"""Keys of tokens that the class embeds as token 0, and their defaults."""
KIMI_K25_TEXT = replace(V3, architecture="kimi_k25 (text_config)")
KIMI_K25 = replace(
    decoder_within("kimi_k25", KIMI_K25_TEXT, "deepseek_v3", KIMI_TOWER_KEYS, KIMI_PLACEHOLDERS),
    spellings={"media_placeholder_token_id": "image_token_id"},
)

HUGGING_FACE = HuggingFaceFamily(
    family="deepseek",
    model_types={
        "deepseek_v2": V2,
        "deepseek_v3": V3,
        "kimi_k2": replace(V3, architecture="kimi_k2"),
        "kimi_k25": KIMI_K25,
    },
    name_map=name_map,
    model_type_of=model_type_of,
    copies=copies,
    spelling=spelling,
    architectures={"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"},
    held=held,
)
