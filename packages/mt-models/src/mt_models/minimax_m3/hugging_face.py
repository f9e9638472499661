"""MiniMax-M3, text, in Hugging Face's format: `minimax_m3_vl_text`, and the decoder within `minimax_m3_vl`.

Published files have the decoder within `minimax_m3_vl`, with experts one by one under Mixtral's names. transformers
has no such names for the decoder alone: it is written as transformers holds it in memory. All are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
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
    import_rope_and_share,
    norm_rules,
    one_of,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    ExpertNames,
    expert_rules,
    export_balance,
    export_bias,
    import_bias,
    import_softmax_balance,
    written_packed,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.minimax_m3.config import MiniMaxM3Config

TEXT, WITH_PICTURES = "minimax_m3_vl_text", "minimax_m3_vl"
SPARSE = "minimax_m3_sparse"
"""The value of `layer_types` for a layer that attends to chosen blocks."""

# -- tensors -----------------------------------------------------------------------------------------

NAMES = ExpertNames(gate="mlp.experts.{e}.w1.weight", up="mlp.experts.{e}.w3.weight", down="mlp.experts.{e}.w2.weight")
INDEXER = {
    "linear_q.weight": "q_proj.weight",
    "linear_k.weight": "k_proj.weight",
    "q_layernorm.weight": "q_norm.weight",
    "k_layernorm.weight": "k_norm.weight",
}


def name_map(config: MiniMaxM3Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in layer_rules(config, number)]
    names = decoder_name_map(config, layers)
    return NameMap(names.rules, 0, names.ignored | TOWER | PREDICTION)


def layer_rules(config: MiniMaxM3Config, number: int) -> list[Rule]:
    rules = [
        *norm_rules(PRE_NORMS),
        *norm_rules(QK_NORMS),
        *attention_rules(config),
        *feed_forward_rules(config, number),
    ]
    if config.sparse_layers[number]:
        ours, theirs = f"{OURS}self_attention.indexer.", f"{THEIRS}self_attn.indexer."
        rules += [Same(ours + canonical, theirs + external) for canonical, external in INDEXER.items()]
    return [rule.for_layer(number) for rule in rules]


def feed_forward_rules(config: MiniMaxM3Config, number: int) -> list[Rule]:
    moe = MoEOptions(config)
    if not moe.layers[number]:
        return gated_rules("mlp")
    routed = [rule for rule in expert_rules(moe, NAMES, always_biased=True) if ".shared_experts." not in rule.ours]
    return [*written_packed(routed), *gated_rules("mlp.shared_experts")]


def gated_rules(part: str) -> list[Rule]:
    """Gate and up in one matrix, or apart as published files have them; down."""
    ours, theirs = f"{OURS}{part}.", f"{THEIRS}{part}."
    apart = Concatenate(f"{ours}linear_fc1.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"))
    return [
        Same(f"{ours}linear_fc1.weight", f"{theirs}gate_up_proj.weight", others=(apart,)),
        Same(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight"),
    ]


TOWER = frozenset(
    {
        *(f"{prefix}{part}.*" for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        "patch_merge_mlp.*",
    }
)
"""Tensors of the image tower, which this family does not have."""
PREDICTION = frozenset({"mtp.*", "model.mtp.*", "language_model.mtp.*"})
"""Layers of multi-token prediction, which transformers leaves out, too."""
WITHIN = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
"""Prefixes of the decoder in published files, and in the memory of transformers -> those of the decoder alone."""
PUBLISHED = {
    r"\.block_sparse_moe\.e_score_correction_bias$": ".mlp.gate.e_score_correction_bias",
    r"\.block_sparse_moe\.": ".mlp.",
    r"\.self_attn\.index_([qk]_(?:proj|norm))\.": r".self_attn.indexer.\1.",
}
"""Names within a layer in published files -> those of transformers."""


def spelling(config: MiniMaxM3Config, name: str) -> str:
    return in_memory(alone(name))


def alone(name: str) -> str:
    """The name in a file of the decoder alone."""
    prefix = next((prefix for prefix in WITHIN if name.startswith(prefix)), "")
    return WITHIN.get(prefix, "") + name.removeprefix(prefix)


def in_memory(name: str) -> str:
    """transformers' name of a tensor of a layer, from the published one."""
    for pattern, instead in PUBLISHED.items():
        name = re.sub(pattern, instead, name)
    return name


# -- which layers ------------------------------------------------------------------------------------


def import_layers(external: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers attend to chosen blocks, and which have experts."""
    layers = external.get("num_hidden_layers", 60)
    blocks = external.get("sparse_attention_config") or {}
    attention = _kinds(external, "layer_types", {SPARSE: True, FULL: False})
    if attention is None:
        attention = _flags(blocks, "sparse_attention_freq")
    experts = _kinds(external, "mlp_layer_types", {"sparse": True, "dense": False})
    if experts is None:
        experts = _flags(external, "moe_layer_freq")
    attention = [False] * layers if attention is None else attention
    experts = [True] * layers if experts is None else experts
    for key, flags in (("layer_types", attention), ("mlp_layer_types", experts)):
        if len(flags) != layers:
            raise ConfigError(f"{key} has {len(flags)} entries, and num_hidden_layers={layers}; it needs one for each")
    return {"sparse_attention_freq": frequency_of(attention), "moe_layer_freq": frequency_of(experts)}


def _kinds(external: Mapping[str, Any], key: str, known: Mapping[str, bool]) -> list[bool] | None:
    kinds = external.get(key)
    if kinds is None:
        return None
    if others := sorted({str(kind) for kind in kinds} - set(known)):
        raise ConfigError(f"{key} has {', '.join(others)}, which is not supported; it can be {' or '.join(known)}")
    return [known[kind] for kind in kinds]


def _flags(table: Mapping[str, Any], key: str) -> list[bool] | None:
    flags = table.get(key)
    return None if flags is None else [bool(flag) for flag in flags]


# -- blocks ------------------------------------------------------------------------------------------

BLOCK_KEYS: Mapping[str, tuple[str, str, int]] = {
    "sparse_num_index_heads": ("index_n_heads", "sparse_num_index_heads", 4),
    "sparse_index_dim": ("index_head_dim", "sparse_index_dim", 128),
    "sparse_block_size": ("index_block_size", "sparse_block_size", 128),
    "sparse_topk_blocks": ("index_topk_blocks", "sparse_topk_blocks", 16),
    "sparse_local_block": ("index_local_blocks", "sparse_local_blocks", 1),
}
"""Keys of sparse_attention_config -> those beside it in transformers, ours, the default."""
BLOCK_FIELDS = tuple(flat for flat, _, _ in BLOCK_KEYS.values())
BLOCKS_FIXED: Mapping[str, Any] = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}


def import_blocks(external: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of indexers and blocks. Raises ConfigError for what the class does not compute."""
    table = dict(external.get("sparse_attention_config") or {})
    sizes = {}
    for name, (flat, ours, default) in BLOCK_KEYS.items():
        stated = {flat: external.get(flat), f"sparse_attention_config.{name}": table.pop(name, None)}
        sizes[ours] = one_of(stated, tuple(stated), default)
    for key, wanted in BLOCKS_FIXED.items():
        if (value := table.pop(key, wanted)) != wanted:
            raise ConfigError(f"sparse_attention_config.{key}={value!r} is not supported; it can be {wanted!r}")
    sparse, without = table.pop("sparse_attention_freq", None), table.pop("sparse_disable_index_value", None)
    if without is not None and sparse is not None and any(a and not b for a, b in zip(sparse, without, strict=False)):
        raise ConfigError(
            f"sparse_attention_config.sparse_disable_index_value={without} is not supported: layers with chosen blocks "
            "have an indexer without values, with a 1 there"
        )
    if table:
        raise ConfigError(f"sparse_attention_config has keys that are not known: {', '.join(sorted(table))}")
    return sizes


# -- positions ---------------------------------------------------------------------------------------

ROTATED, SHARE = "rotary_dim", "partial_rotary_factor"


def import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated share of a head. Published files say it twice; transformers reads the share alone, other programs the
    number of channels, so that a file in which the two differ is refused."""
    head = external.get("head_dim", 128)
    values = import_rope_and_share(external, 1.0, default_base=5000000.0)
    rotated = external.get(ROTATED)
    if rotated is not None and rotated != int(head * values["rotary_percent"]):
        raise ConfigError(
            f"{ROTATED}={rotated} and {SHARE}={values['rotary_percent']} (of rope_parameters, rope_scaling or "
            f"beside it) of head_dim={head} contradict each other: transformers reads {SHARE} alone (1.0 where it is "
            f"missing), others {ROTATED}; remove what is wrong"
        )
    return values


# -- configuration -----------------------------------------------------------------------------------

EXPERT_KEYS = (
    *("intermediate_size", "num_local_experts", "num_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("shared_intermediate_size", "router_aux_loss_coef", BIAS_KEY),
)
LAYER_KEYS = ("layer_types", "mlp_layer_types", "moe_layer_freq", "num_hidden_layers", "sparse_attention_config")
EXPRESSED = (
    *("moe_ffn_hidden_size", "moe_router_topk", "moe_router_enable_expert_bias", "moe_layer_freq"),
    *("moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size"),
)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    topk = external.get("num_experts_per_tok", 4)
    if topk < 2:
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 2 or more")
    layers = import_layers(external)
    moe: dict[str, Any] = {
        "num_experts": one_of(external, ("num_local_experts", "num_experts"), 128),
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(external.get("routed_scaling_factor", 2.0)),
        "moe_ffn_hidden_size": external.get("intermediate_size", 3072),
        "moe_shared_expert_intermediate_size": external.get("shared_intermediate_size", 3072),
        "moe_layer_freq": layers.pop("moe_layer_freq"),
        **import_bias(external),
        **import_softmax_balance(external, default=0.001),
    }
    return {**layers, **import_blocks(external), **import_positions(external), "moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MiniMaxM3Config.model_validate(model)
    moe = MoEOptions(config)
    moe.require(TEXT, **dict.fromkeys(EXPRESSED, ANY), moe_router_score_function=("sigmoid",))
    if moe.shared_size is None:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size=null cannot be written as a Hugging Face {TEXT}, which has "
            "a shared expert; it can be its width"
        )
    blocks = {flat: getattr(config, ours) for flat, ours, _ in BLOCK_KEYS.values()}
    return {
        **export_shape(config),
        **export_rope(config),
        **export_bias(moe),
        **export_balance(moe),
        **blocks,
        "hidden_act": "silu",
        "index_n_heads": config.index_heads,
        ROTATED: config.rotary_dim,
        SHARE: config.rotary_percent,
        "intermediate_size": moe.ffn_size,
        "dense_intermediate_size": config.ffn_size,
        "shared_intermediate_size": moe.shared_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "layer_types": [SPARSE if sparse else FULL for sparse in config.sparse_layers],
        "mlp_layer_types": ["sparse" if has_experts else "dense" for has_experts in moe.layers],
    }


MINIMAX_M3 = ConfigMap(
    architecture=TEXT,
    fields=(
        *(field for field in decoder_fields(tied=False, positions=524288) if field.theirs != "intermediate_size"),
        Field("dense_intermediate_size", "ffn_hidden_size", default=12288),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels", default=128),
    ),
    fixed=(
        Fixed("swiglu_alpha", (1.702,)),
        Fixed("swiglu_limit", (7.0,)),
        Fixed("swiglu_beta", (1.0,), written=False),
        Fixed("n_shared_experts", (1,), written=False),
        Fixed("use_gemma_norm", (True,), written=False),
        Fixed("use_qk_norm", (True,), written=False),
        Fixed("qk_norm_type", ("per_head",), written=False),
        Fixed("attention_output_gate", (False,), written=False),
        Fixed("attention_bias", (False,), written=False),
        Fixed("scoring_func", ("sigmoid",), written=False),
        Fixed("norm_topk_prob", (True,), written=False),
        Fixed("use_routing_bias", (True,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "hidden_act": "the class has one activation, and sets silu for what published files name swigluoai",
        "router_jitter_noise": "no layer of the class reads it",
        **dict.fromkeys(
            ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "num_nextn_predict_layers"),
            "of layers that predict further tokens, which are left out",
        ),
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, ROTATED, SHARE, *EXPERT_KEYS, *LAYER_KEYS, *BLOCK_FIELDS),
    export_extra=export_extra,
)


# -- within a file with pictures ---------------------------------------------------------------------

OUTER_KEYS = (
    *("image_token_index", "video_token_index", "projector_hidden_size", "image_seq_length", "merged_hidden_size"),
    *("img_token_compression_config", "projector_hidden_act", "multimodal_projector_bias"),
)
"""Keys of the image tower beside those that all such files have."""


def import_text(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the decoder, `family` included, from `text_config`. Its LM head is tied if either of two keys says so."""
    text = dict(external.get("text_config") or {})
    if not text:
        raise ConfigError("text_config is empty or missing; it has to be a JSON object with the keys of the decoder")
    tied = (external.get("tie_word_embeddings"), text.get("tie_word_embeddings"))
    return {"family": "minimax_m3", **MINIMAX_M3.import_value({**text, "tie_word_embeddings": any(tied)})}


def import_within(external: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in import_text(external).items() if key != "family"}


WITHIN_PICTURES = replace(decoder_within(WITH_PICTURES, MINIMAX_M3, TEXT, OUTER_KEYS), import_extra=import_within)

HUGGING_FACE = HuggingFaceFamily(
    family="minimax_m3",
    model_types={TEXT: MINIMAX_M3, WITH_PICTURES: WITHIN_PICTURES},
    name_map=name_map,
    model_type_of=lambda config: TEXT,
    copies=tied_output,
    spelling=spelling,
    architectures={TEXT: "MiniMaxM3VLForCausalLM"},
)
