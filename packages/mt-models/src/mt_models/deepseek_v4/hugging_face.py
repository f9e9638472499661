"""DeepSeek-V4 in Hugging Face's format: tensors under the names of DeepSeek's own files, which are written.

The class in transformers has other names in memory, with the experts of a layer in one tensor, and saves a mixture of
both; all three are read. The layers of multi-token prediction are `mtp.{d}`, which transformers leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    ROPE_KEYS,
    decoder_fields,
    export_scaling,
    import_scaling,
    one_of,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_bias,
    import_bias,
    shared_experts,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.deepseek_v4.config import DeepseekV4Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value

KIND = "deepseek_v4"
WINDOW, INDEXED, COMPRESSED = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""Values of `layer_types`: without entries, with an indexer, without one."""
HASHED, ROUTED = "hash_moe", "moe"
"""Values of `mlp_layer_types`."""

# -- tensors -----------------------------------------------------------------------------------------

NAMES = ExpertNames(
    router="ffn.gate.weight",
    gate="ffn.experts.{e}.w1.weight",
    up="ffn.experts.{e}.w3.weight",
    down="ffn.experts.{e}.w2.weight",
    expert_bias="ffn.gate.bias",
    stacked_router="ffn.gate.weight",
    stacked_gate_up="ffn.experts.gate_up_proj",
    stacked_down="ffn.experts.down_proj",
)
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "pre_mlp_layernorm.weight": "ffn_norm.weight",
    "self_attention.linear_q_down_proj.weight": "attn.wq_a.weight",
    "self_attention.q_layernorm.weight": "attn.q_norm.weight",
    "self_attention.linear_q_up_proj.weight": "attn.wq_b.weight",
    "self_attention.linear_kv_proj.weight": "attn.wkv.weight",
    "self_attention.kv_layernorm.weight": "attn.kv_norm.weight",
    "self_attention.linear_o_group_proj.weight": "attn.wo_a.weight",
    "self_attention.linear_proj.weight": "attn.wo_b.weight",
    "self_attention.core_attention.softmax_offset": "attn.attn_sink",
}
COMPRESSOR = {
    "linear_kv.weight": "wkv.weight",
    "linear_gate.weight": "wgate.weight",
    "position_bias": "ape",
    "norm.weight": "norm.weight",
}
INDEXER = {"linear_wq_b.weight": "wq_b.weight", "linear_weights_proj.weight": "weights_proj.weight"}
STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
PREDICTION = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
}


TABLE_OFFSET = 256
"""What the router of mt-moe takes from the numbers of experts in its table."""


@dataclass(frozen=True)
class ExpertTable(Rule):
    """Numbers of experts: in int64 there, less 256 in fp32 here."""

    experts: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        (table,) = tensors
        if not table.is_meta and table.numel() and not 0 <= int(table.min()) <= int(table.max()) < self.experts:
            raise CheckpointError(f"{self.sources[0]} names experts outside of 0 to {self.experts - 1}")
        return table.float() - TABLE_OFFSET

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.to(torch.int64) + TABLE_OFFSET]


def name_map(config: DeepseekV4Config) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "embed.weight"),
        *_output_rules("output.", ""),
        Same("output_layer.weight", "head.weight"),
    ]
    for number in range(config.num_layers):
        rules += layer_rules(config, number, f"decoder.layers.{number}.", f"layers.{number}.")
    counted = config.with_predicted_layers()
    for depth in range(config.mtp_num_layers):
        ours, theirs = f"mtp.layers.{depth}.", f"mtp.{depth}."
        rules += [Same(ours + canonical, theirs + external) for canonical, external in PREDICTION.items()]
        rules += _output_rules(f"{ours}output.", theirs)
        rules += layer_rules(counted, config.num_layers + depth, f"{ours}mtp_model_layer.", theirs)
    # What files have for drafting is left out where the model is configured without.
    return NameMap(rules, 0, ignored=() if config.mtp_num_layers else ("mtp.*",))


def _output_rules(ours: str, theirs: str) -> list[Rule]:
    streams = [
        Same(f"{ours}hyper_head.{canonical}", f"{theirs}hc_head_{external}") for canonical, external in STREAMS.items()
    ]
    return [Same(f"{ours}norm.weight", f"{theirs}norm.weight"), *streams]


def layer_rules(config: DeepseekV4Config, number: int, ours: str, theirs: str) -> list[Rule]:
    """Rules of layer `number`. ours, theirs: prefixes of its names."""
    rules: list[Rule] = [Same(ours + canonical, theirs + external) for canonical, external in LAYER.items()]
    for sublayer, name in (("attention", "attn"), ("mlp", "ffn")):
        rules += [Same(f"{ours}{sublayer}_connection.{a}", f"{theirs}hc_{name}_{b}") for a, b in STREAMS.items()]
    attention, attn = f"{ours}self_attention.", f"{theirs}attn."
    if config.compression_of(number):
        rules += _compressor_rules(f"{attention}compressor.", f"{attn}compressor.")
    if config.is_indexed(number):
        rules += _compressor_rules(f"{attention}indexer.compressor.", f"{attn}indexer.compressor.")
        rules += [
            Same(f"{attention}indexer.{canonical}", f"{attn}indexer.{external}")
            for canonical, external in INDEXER.items()
        ]
    return [*rules, *_expert_rules(MoEOptions(config), number, ours, theirs)]


def _compressor_rules(ours: str, theirs: str) -> list[Rule]:
    return [Same(ours + canonical, theirs + external) for canonical, external in COMPRESSOR.items()]


def _expert_rules(moe: MoEOptions, number: int, ours: str, theirs: str) -> list[Rule]:
    hashed = number < moe["moe_router_hash_layers"]
    bias = f"{ours}mlp.router.expert_bias"
    rules = [
        rule
        for rule in expert_rules(moe, NAMES, ours=ours, theirs=theirs, always_biased=not hashed)
        if "shared_experts" not in rule.ours and not (hashed and rule.ours == bias)
    ]
    if hashed:
        table = f"{theirs}ffn.gate.tid2eid"
        rules.append(ExpertTable(f"{ours}mlp.router.token_experts", table, experts=moe.num_experts))
    if moe.shared_size is not None:
        shared = f"{theirs}ffn.shared_experts."
        halves = (f"{shared}w1.weight", f"{shared}w3.weight")
        rules.append(Concatenate(f"{ours}mlp.shared_experts.linear_fc1.weight", halves))
        rules.append(Same(f"{ours}mlp.shared_experts.linear_fc2.weight", f"{shared}w2.weight"))
    return rules


SPELLINGS = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
)
"""From names that transformers has in memory or saves to published ones, one after the other."""


def spelling(config: DeepseekV4Config, name: str) -> str:
    for pattern, instead in SPELLINGS:
        name = re.sub(pattern, instead, name)
    return name


# -- configuration -----------------------------------------------------------------------------------


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none of the published kind: transformers leaves them
    out and keeps the count, and some files have drafting layers of another kind."""
    if any(re.match(r"mtp\.0\.e_proj\.", name) for name in names):
        return external
    return {**external, "num_nextn_predict_layers": 0}


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = external["num_hidden_layers"]
    return {
        **_import_kinds(external, layers),
        **_import_rope(external),
        "qk_pos_emb_head_dim": _rotated(external),
        "moe": _import_experts(external, layers),
    }


def _rotated(external: Mapping[str, Any]) -> int:
    size = external.get("head_dim", 512)
    if external.get("partial_rotary_factor") is not None:
        return int(size * external["partial_rotary_factor"])
    rotated: int = external.get("qk_rope_head_dim") or int(size * 64 / 512)
    return rotated


def _import_kinds(external: Mapping[str, Any], layers: int) -> dict[str, Any]:
    rates = {INDEXED: 4, COMPRESSED: 128, **(external.get("compress_rates") or {})}
    for key, kind in (("compress_rate_csa", INDEXED), ("compress_rate_hca", COMPRESSED)):
        rates[kind] = external.get(key) or rates[kind]
    ratios = {WINDOW: 0, **rates}
    kinds, stated = external.get("layer_types"), external.get("compress_ratios")
    if kinds is None and stated is None:
        kinds = [COMPRESSED] * 2 + [INDEXED if layer % 2 else COMPRESSED for layer in range(layers)]
    if kinds is None:
        assert stated is not None
        named = list(stated[:layers])
    else:
        if unknown := set(kinds) - set(ratios):
            raise ConfigError(f"layer_types has {sorted(unknown)}; it can have {', '.join(ratios)}")
        named = [ratios[kind] for kind in kinds[:layers]]
    if stated is not None and list(stated[:layers]) != named:
        raise ConfigError("layer_types and compress_ratios contradict each other; remove what is wrong")
    return {"compress_ratios": named, "indexed_compress_ratio": rates[INDEXED]}


def _import_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    table = one_of(_with_one_table(external), ("rope_parameters", "rope_scaling"), {})
    base, compressed_base = external.get("rope_theta", 10000.0), external.get("compress_rope_theta", 160000.0)
    if _has_both_kinds(table):
        for kind in ("main", "compress"):
            _require_share(external, kind, table[kind])
        main, table = _without_share(table["main"]), _without_share(table["compress"])
        base, compressed_base = main.pop("rope_theta", base), table.pop("rope_theta", compressed_base)
        if import_scaling(main, "rope_parameters.main"):
            raise ConfigError(f"rope_parameters.main={main} is not supported; it can have the rope_type default")
        scaling = import_scaling(table, "rope_parameters.compress")
    else:
        scaling = import_scaling(_without_share(table, "rope_theta"))
        if scaling.get("rope_scaling_type") == "yarn":
            # Queries and keys are not lengthened where a file does not say it.
            scaling.setdefault("rope_attention_factor", 1.0)
    return {"rotary_base": float(base), "compress_rotary_base": float(compressed_base), **scaling}


def _has_both_kinds(table: Any) -> bool:
    return isinstance(table, Mapping) and all(isinstance(table.get(kind), Mapping) for kind in ("main", "compress"))


def _with_one_table(external: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a rope_scaling of the type default beside a table of each kind of layer, which alone the class reads."""
    scaling = external.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not _has_both_kinds(external.get("rope_parameters")):
        return external
    if scaling.get("rope_theta") is not None or import_scaling(_without_share(scaling)):
        return external
    return {key: value for key, value in external.items() if key != "rope_scaling"}


def _require_share(external: Mapping[str, Any], kind: str, table: Mapping[str, Any]) -> None:
    """Raises ConfigError where a table rotates another share of the channels than the configuration says."""
    share, rotated = table.get("partial_rotary_factor", 1.0), _rotated(external)
    if int(external.get("head_dim", 512) * share) != rotated:
        raise ConfigError(
            f"rope_parameters.{kind}.partial_rotary_factor={share} and partial_rotary_factor (or qk_rope_head_dim), "
            f"which rotates {rotated} channels, contradict each other"
        )


def _without_share(table: Mapping[str, Any], *others: str) -> dict[str, Any]:
    # Repeats the share of the channels that is stated beside it.
    return {key: value for key, value in table.items() if key not in ("partial_rotary_factor", *others)}


def _import_experts(external: Mapping[str, Any], layers: int) -> dict[str, Any]:
    topk = external.get("num_experts_per_tok", 6)
    if topk == 1 or not external.get("norm_topk_prob", True):
        raise ConfigError(
            f"num_experts_per_tok={topk} and norm_topk_prob={external.get('norm_topk_prob', True)} are not supported: "
            "weights are those of several experts, normalized"
        )
    width, shared = external.get("moe_intermediate_size", 2048), external.get("n_shared_experts", 1)
    if shared != 1:
        raise ConfigError(f"n_shared_experts={shared} is not supported: the class has one shared expert; it can be 1")
    scale = float(external.get("routed_scaling_factor", 1.5))
    coefficient = external.get("router_aux_loss_coef")
    balance = "seq_aux_loss" if coefficient is None else "aux_loss"
    return {
        "num_experts": external.get("n_routed_experts", 256),
        "moe_router_topk": topk,
        "moe_router_score_function": "sqrtsoftplus",
        **import_bias(external),
        "moe_router_hash_layers": _hashed(external, layers),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
        "moe_router_load_balancing_type": [balance],
        "moe_aux_loss_coeff": [0.0001 if coefficient is None else float(coefficient)],
    }


def _hashed(external: Mapping[str, Any], layers: int) -> int:
    kinds = external.get("mlp_layer_types")
    if kinds is None:
        stated = external.get("num_hash_layers")
        return min(3 if stated is None else stated, layers)
    count = list(kinds).count(HASHED)
    if list(kinds) != [HASHED] * count + [ROUTED] * (len(kinds) - count):
        raise ConfigError(f"mlp_layer_types={list(kinds)} is not supported: {HASHED} has to come before {ROUTED}")
    return count


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = DeepseekV4Config.model_validate(model)
    require_value(config, "dsa_dense_warmup", (False,), KIND)
    ratios = config.ratios
    others = sorted({ratio for ratio in ratios if ratio not in (0, config.indexed_compress_ratio)})
    if len(others) > 1:
        raise ConfigError(
            f"model.compress_ratios={ratios} cannot be written as a Hugging Face {KIND}, which has one ratio of layers "
            f"without an indexer, not {len(others)}"
        )
    names = {0: WINDOW, config.indexed_compress_ratio: INDEXED, **dict.fromkeys(others, COMPRESSED)}
    scaling = export_scaling(config)
    if scaling is not None and config.rope_attention_factor == 1.0:
        # What the class takes where a file does not say it, as published ones do.
        scaling.pop("attention_factor", None)
    elif scaling is not None and config.rope_scaling_type == "yarn":
        scaling["attention_factor"] = _attention_factor(config)
    return {
        # Published files count the layers of multi-token prediction.
        "compress_ratios": ratios + [0] * config.mtp_num_layers,
        "layer_types": [names[ratio] for ratio in ratios],
        "compress_rates": {INDEXED: config.indexed_compress_ratio, COMPRESSED: others[0] if others else 128},
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        # Its default would have to be within the vocabulary, and keep the row of that token from being trained.
        "pad_token_id": None,
        **_export_experts(config),
    }


def _attention_factor(config: DeepseekV4Config) -> float:
    from mt_models.blocks.rotary import yarn_scale

    return yarn_scale(config, config.rope_scaling_factor or 1.0)


def _export_experts(config: DeepseekV4Config) -> dict[str, Any]:
    moe = MoEOptions(config)
    moe.require(
        KIND,
        moe_ffn_hidden_size=ANY,
        moe_router_topk=ANY,
        moe_router_score_function=("sqrtsoftplus",),
        moe_router_topk_scaling_factor=ANY,
        moe_router_enable_expert_bias=ANY,
        moe_router_hash_layers=ANY,
        moe_shared_expert_intermediate_size=ANY,
        moe_layer_freq=ANY,
    )
    if moe.topk == 1:
        raise ConfigError(
            f"model.moe.moe_router_topk=1 cannot be written as a Hugging Face {KIND}, which normalizes the weights of "
            "the chosen experts; it can be 2 or more"
        )
    types = moe.options.get("moe_router_load_balancing_type", ["aux_loss"])
    coefficients = dict(zip(types, moe.options.get("moe_aux_loss_coeff") or [0.01], strict=False))
    aux = {"router_aux_loss_coef": coefficients["aux_loss"]} if "aux_loss" in coefficients else {}
    return {
        **export_bias(moe),
        **aux,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": _one_shared_expert(moe),
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "norm_topk_prob": True,
        "num_hash_layers": moe["moe_router_hash_layers"],
    }


def _one_shared_expert(moe: MoEOptions) -> int:
    if (count := shared_experts(moe, KIND)) != 1:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size={moe.shared_size} cannot be written as a Hugging Face "
            f"{KIND}, whose shared expert is as wide as a routed one; it can be {moe.ffn_size}"
        )
    return count


DSPARK = "of drafting layers of another kind, which are left out"

DEEPSEEK_V4 = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            entry
            for entry in decoder_fields(tied=False, positions=1048576, epsilon=1e-6)
            if entry.theirs not in ("tie_word_embeddings", "intermediate_size")
        ),
        Field("head_dim", "kv_channels", default=512),
        Field("q_lora_rank", "q_lora_rank", default=1024),
        Field("o_groups", "o_groups", default=8),
        Field("o_lora_rank", "o_lora_rank", default=1024),
        Field("sliding_window", "sliding_window", default=128),
        Field("index_n_heads", "dsa_indexer_n_heads", default=64),
        Field("index_head_dim", "dsa_indexer_head_dim", default=128),
        Field("index_topk", "dsa_indexer_topk", default=512),
        Field("hc_mult", "hyper_connection_streams", default=4),
        Field("hc_sinkhorn_iters", "hyper_connection_iterations", default=20),
        Field("hc_eps", "hyper_connection_epsilon", import_value=float, default=1e-6),
        Field("compress_rope_theta", "compress_rotary_base", import_value=float, default=160000.0),
        Field("num_nextn_predict_layers", "mtp_num_layers", default=1),
    ),
    fixed=(
        SILU,
        *NOT_A_CHOICE,
        Fixed("num_key_value_heads", (1,)),
        Fixed("swiglu_limit", (10.0,)),
        Fixed("scoring_func", ("sqrtsoftplus",)),
        Fixed("attention_bias", (False,)),
        Fixed("mlp_bias", (False,), written=False),
        Fixed("tie_word_embeddings", (False,)),
        Fixed("topk_method", ("noaux_tc",)),
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "router_jitter_noise": "no layer of the class reads it",
        "expert_dtype": "the dtype of stored experts, which their tensors say",
        **dict.fromkeys(
            ("dspark_target_layer_ids", "dspark_markov_rank", "dspark_block_size", "dspark_noise_token_id"), DSPARK
        ),
    },
    import_extra=import_extra,
    import_extra_keys=(
        *ROPE_KEYS, BIAS_KEY, "compress_ratios", "layer_types", "compress_rates", "compress_rate_csa",
        "compress_rate_hca", "qk_rope_head_dim", "partial_rotary_factor", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob", "num_hash_layers",
        "mlp_layer_types", "router_aux_loss_coef",
    ),
    export_extra=export_extra,
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family="deepseek_v4",
    model_types={KIND: DEEPSEEK_V4},
    name_map=name_map,
    spelling=spelling,
    architectures={KIND: "DeepseekV4ForCausalLM"},
    held=held,
)
