"""GLM-5.3-Flash in Hugging Face's format: the decoder alone (`glm5_next_text`), also of files that hold it beside an
image tower (`glm5_next`).

transformers has other names in memory, with the convolutions and the experts of a layer each in one tensor; those are
read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
)
from mt_models.blocks.hugging_face_delta_net import LINEAR, import_kinds
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    expert_rules,
    export_balance,
    export_bias,
    group_scores,
    import_bias,
    import_groups,
    import_softmax_balance,
    require_normalized,
    shared_experts,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.glm5_next.config import Glm5NextConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value
from mt_models.kimi_linear.hugging_face import delta_rules

KIND, WITH_PICTURES = "glm5_next_text", "glm5_next"
INDEXED = "indexed_attention"
"""Value of `layer_types`, beside LINEAR."""
OTHER_NAMES = (FULL, "deepseek_sparse_attention")
"""The same under other names, the second that of published files."""

# -- tensors -----------------------------------------------------------------------------------------

INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
    "linear_gate.weight": "index_kpool_compress_gate",
    "position_bias": "index_kpool_compress_ape",
}
STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
FINAL_NORM = "decoder.final_layernorm.norm.weight"


def name_map(config: Glm5NextConfig) -> NameMap:
    rules: list[Rule] = []
    for number, linear in enumerate(config.linear_layers):
        block = delta_rules(config, Same) if linear else _sparse_rules(config)
        layer = (*norm_rules(PRE_NORMS), *_connection_rules(), *block, *_feed_forward(config, number))
        rules += [rule.for_layer(number) for rule in layer]
    names = decoder_name_map(config, [*rules, *deepseek.prediction_rules(config, _predicted_rules)])
    others = [rule for rule in names.rules if rule.ours != "decoder.final_layernorm.weight"]
    # The image tower, which this family has not.
    left_out = {"model.visual.*"} | deepseek.unread_prediction(config)
    return NameMap([*others, Same(FINAL_NORM, "model.norm.weight")], 0, names.ignored | left_out)


def _predicted_rules(config: Glm5NextConfig, number: int) -> list[Rule]:
    """Rules of a layer of multi-token prediction, which has one residual stream."""
    layer = (*norm_rules(PRE_NORMS), *_sparse_rules(config), *_feed_forward(config, number))
    return [rule.for_layer(number) for rule in layer]


def _connection_rules() -> list[Rule]:
    return [
        Same(f"{OURS}{ours}_connection.{canonical}", f"{THEIRS}hc_{theirs}_{external}")
        for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
        for canonical, external in STREAMS.items()
    ]


def _sparse_rules(config: Glm5NextConfig) -> list[Rule]:
    ours, theirs = f"{OURS}self_attention.indexer.", f"{THEIRS}self_attn.indexer."
    return [
        *deepseek.latent_rules(config),
        *(Same(ours + canonical, theirs + external) for canonical, external in INDEXER.items()),
    ]


def _feed_forward(config: Glm5NextConfig, number: int) -> list[Rule]:
    if config.moe is not None and MoEOptions(config).layers[number]:
        return expert_rules(MoEOptions(config), deepseek.NAMES, always_biased=True)
    return feed_forward_rules()


SPELLINGS = (
    (r"^model\.language_model\.", "model."),
    (r"^(?=(layers|embed_tokens|norm)\.)", "model."),
    (r"\.forget_gate\.", "."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
)
"""From names of files with an image tower, and from those of transformers, to the names of the decoder alone."""


def spelling(config: Glm5NextConfig, name: str) -> str:
    for pattern, instead in SPELLINGS:
        name = re.sub(pattern, instead, name)
    return name


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none."""
    inside = [re.sub(SPELLINGS[0][0], SPELLINGS[0][1], name) for name in names]
    if isinstance(text := external.get("text_config"), Mapping):
        return {**external, "text_config": held(text, inside)}
    return deepseek.held({"num_hidden_layers": 45, **external}, inside)


# -- configuration -----------------------------------------------------------------------------------

TABLE = "linear_attn_config"
DELTA_KEYS = {
    "linear_num_heads": ("num_heads", 64),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
"""Keys -> those of `linear_attn_config`, which count where a file has them, and the defaults of the class."""
EXPERTS: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
"""Defaults of the class."""
SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    heads, layers = external.get("num_attention_heads", 64), external["num_hidden_layers"]
    if external.get("num_key_value_heads") not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads={external['num_key_value_heads']} is not supported; it can be "
            f"num_attention_heads={heads}"
        )
    if external.get("q_lora_rank", 1) is None:
        raise ConfigError("q_lora_rank=None is not supported: the queries of the indexer come from the same latent")
    table = external.get(TABLE) or {}
    sizes = {key: table.get(name, external.get(key, default)) for key, (name, default) in DELTA_KEYS.items()}
    kinds = _kinds(external, table)
    _require_own_indexers(external, kinds)
    return {
        "linear_num_key_heads": sizes["linear_num_heads"],
        "linear_num_value_heads": sizes["linear_num_heads"],
        "linear_key_head_dim": sizes["linear_head_dim"],
        "linear_value_head_dim": sizes["linear_head_dim"],
        "linear_conv_kernel_dim": sizes["linear_conv_kernel_dim"],
        "linear_attention_freq": import_kinds({"layer_types": kinds}, layers),
        "linear_decay_lower_bound": _bound(external, table),
        **_import_experts(external),
    }


def _bound(external: Mapping[str, Any], table: Mapping[str, Any]) -> float | None:
    bound = table.get("gate_lower_bound", external.get("linear_lower_bound", -5.0))
    if bound is None and table and table.get("safe_gate", True):
        bound = -5.0
    return None if bound is None else float(bound)


def _kinds(external: Mapping[str, Any], table: Mapping[str, Any]) -> list[Any]:
    """The kind of each layer, FULL for those with an indexer. Raises ConfigError where the lists of the table, counted
    from 0, say something else."""
    layers = external["num_hidden_layers"]
    layer_types: Sequence[Any] | None = external.get("layer_types")
    if layer_types is None:
        layer_types = [INDEXED if layer % 4 == 3 else LINEAR for layer in range(layers)]
    kinds = [FULL if kind in (INDEXED, *OTHER_NAMES) else kind for kind in layer_types]
    for key, kind in (("kda_layers", LINEAR), ("full_attn_layers", FULL)):
        expected = [layer for layer, other in enumerate(kinds) if other == kind]
        if key in table and sorted(table[key]) != expected:
            raise ConfigError(f"{TABLE}.{key}={table[key]} contradicts layer_types, by which it is {expected}")
    return kinds


def _require_own_indexers(external: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Raises ConfigError for a layer that takes the choice of another one's indexer."""
    types = external.get("indexer_types")
    if types is None and (pattern := external.get("index_topk_pattern")) is not None:
        types = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if types is None:
        freq, offset = max(external.get("index_topk_freq", 1), 1), external.get("index_skip_topk_offset", 2)
        types = ["shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(len(kinds))]
    others = [layer for layer, kind in enumerate(kinds) if kind == FULL and list(types)[layer : layer + 1] != ["full"]]
    if others:
        raise ConfigError(
            f"indexer_types={list(types)} is not supported: each layer with {INDEXED} has to be full, and layers "
            f"{others} are not"
        )


def _import_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {key: external[key] for key in (*EXPERTS, deepseek.KINDS) if external.get(key) is not None}
    layers = external["num_hidden_layers"]
    with_defaults = {**EXPERTS, **stated, "num_hidden_layers": layers}
    if deepseek.KINDS in stated and "first_k_dense_replace" not in stated:
        del with_defaults["first_k_dense_replace"]
    if not any(deepseek.sparse_layers(with_defaults, dense=3, layers=layers)):
        return {}
    require_normalized(with_defaults)
    moe = deepseek.import_moe(with_defaults, dense=3, shared=1, layers=45, scale=2.5)
    moe |= {
        "moe_router_score_function": "sigmoid",
        **import_bias(external),
        **import_groups(with_defaults, score_topk=2),
        **import_softmax_balance(external, default=0.001),
    }
    return {"moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Glm5NextConfig.model_validate(model)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "untie_embeddings_and_output_weights", (True,), KIND)
    require_value(config, "latent_epsilon", (config.norm_epsilon,), KIND)
    require_value(config, "dsa_indexer_k_norm_epsilon", (1e-6,), KIND)
    return {
        "linear_num_heads": config.linear_num_key_heads,
        "linear_head_dim": config.linear_key_head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_lower_bound": config.linear_decay_lower_bound,
        "layer_types": [LINEAR if linear else INDEXED for linear in config.linear_layers],
        "indexer_types": ["full"] * config.num_layers,
        # Its default would have to be within the vocabulary, and keep the row of that token from being trained.
        "pad_token_id": None,
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        **_export_experts(config),
    }


def _export_experts(config: Glm5NextConfig) -> dict[str, Any]:
    if config.moe is None:
        return _export_kinds(config)
    moe = MoEOptions(config)
    moe.require(
        KIND,
        **deepseek.EXPRESSED,
        moe_router_score_function=("sigmoid",),
        moe_router_enable_expert_bias=ANY,
        moe_router_group_score_topk=group_scores(moe, 2),
    )
    return {
        **export_bias(moe),
        **export_balance(moe),
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "n_shared_experts": shared_experts(moe, KIND),
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
        **_export_kinds(config),
    }


def _export_kinds(config: Glm5NextConfig) -> dict[str, Any]:
    """The list alone: the class has no number of dense layers."""
    return {deepseek.KINDS: deepseek.export_kinds(config)[deepseek.KINDS]}


COUNT = "num_nextn_predict_layers"
NO_POSITIONS = "of rotary positions, which the class has not"
SIZES = {"q_lora_rank": 1536, "qk_nope_head_dim": 256, "v_head_dim": 256}
GLM5_NEXT_TEXT = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            entry
            for entry in decoder_fields(tied=False, positions=1048576, epsilon=1e-5)
            if entry.theirs != "tie_word_embeddings"
        ),
        *(
            Field(entry.theirs, entry.ours, default=SIZES.get(entry.theirs, entry.default))
            for entry in deepseek.FIELDS
            if entry.theirs != "qk_rope_head_dim"
        ),
        Field("swiglu_limit", "swiglu_limit", import_value=float, default=10.0),
        Field("index_n_heads", "dsa_indexer_n_heads", default=32),
        Field("index_head_dim", "dsa_indexer_head_dim", default=128),
        Field("index_topk", "dsa_indexer_topk", default=2048),
        Field("index_kpool", "dsa_indexer_pool_size", default=16),
        Field(COUNT, "mtp_num_layers", import_value=lambda count: int(count or 0), default=0),
        Field("hc_mult", "hyper_connection_streams", default=4),
        Field("hc_sinkhorn_iters", "hyper_connection_iterations", default=20),
        Field("hc_eps", "hyper_connection_epsilon", import_value=float, default=1e-6),
    ),
    fixed=(
        SILU,
        *NOT_A_CHOICE,
        Fixed("attention_bias", (False,)),
        Fixed("tie_word_embeddings", (False,)),
        Fixed("qk_rope_head_dim", (0,)),
        Fixed("mla_use_nope", (True,)),
        Fixed("mhc", (True,)),
        Fixed("index_kpool_compress", (True,)),
        Fixed("index_kpool_always_select_tail", (True,)),
        Fixed("scoring_func", ("sigmoid",)),
        Fixed("topk_method", ("noaux_tc",)),
        Fixed("moe_layer_freq", (1,), written=False),
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        **dict.fromkeys((*ROPE_KEYS, "rope_interleave", "indexer_rope_interleave"), NO_POSITIONS),
        "index_share_for_mtp_iteration": "whether drafts of a server share the choice of keys",
        "head_dim": "the class computes it from other fields",
        "qk_head_dim": "the sum of other fields",
        "ep_size": "how experts were sharded over ranks; parallel.expert_model_parallel_size says so",
    },
    import_extra=import_extra,
    import_extra_keys=(
        TABLE, *DELTA_KEYS, *EXPERTS, *SHARING, deepseek.KINDS, BIAS_KEY, "layer_types", "num_key_value_heads",
        "linear_lower_bound", "router_aux_loss_coef",
    ),
    export_extra=export_extra,
    spellings={"num_local_experts": "n_routed_experts", "num_mtp_layers": COUNT},
)  # fmt: skip
TOWER_KEYS = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")

HUGGING_FACE = HuggingFaceFamily(
    family="glm5_next",
    model_types={
        KIND: GLM5_NEXT_TEXT,
        WITH_PICTURES: decoder_within(WITH_PICTURES, GLM5_NEXT_TEXT, KIND, TOWER_KEYS),
    },
    name_map=name_map,
    model_type_of=lambda config: KIND,
    spelling=spelling,
    left_out_copies=deepseek.prediction_copies,
    held=held,
    architectures={KIND: "Glm5NextTextModel"},
)
