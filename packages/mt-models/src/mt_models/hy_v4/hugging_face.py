"""Hy4 in Hugging Face's format, `hy_v4`: tensors under the names of published files.

transformers renames gates, sinks and connections in memory; those names are read too. Files hold the experts of a layer
in one tensor, as the class does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    expert_rules,
    export_bias,
    group_scores,
    import_bias,
    import_groups,
    require_normalized,
    shared_experts,
    written_packed,
)
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.deepseek import hugging_face as deepseek
from mt_models.deepseek_v32.hugging_face import FULL, INDEXER, SHARED, import_sharing
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.hy_v4.config import HyV4Config

KIND = "hy_v4"
DENSE, SPARSE = "dense", "sparse"
STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
FINAL_NORM = "decoder.final_layernorm."

# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: HyV4Config) -> NameMap:
    layers = [rule.for_layer(number) for number in range(config.num_layers) for rule in _layer_rules(config, number)]
    names = decoder_name_map(config, layers)
    output: list[Rule] = [
        Same(f"{FINAL_NORM}norm.weight", "model.norm.weight"),
        *(
            Same(f"{FINAL_NORM}hyper_head.{ours}", f"model.hc_head.hc_head_{theirs}")
            for ours, theirs in STREAMS.items()
        ),
    ]
    others = [rule for rule in names.rules if not rule.ours.startswith(FINAL_NORM)]
    # Layers that predict further tokens, which this family does not have.
    return NameMap([*others, *output], 0, names.ignored | {"model.mtp_layers.*"})


def _layer_rules(config: HyV4Config, number: int) -> list[Rule]:
    ours, theirs = f"{OURS}self_attention.", f"{THEIRS}self_attn."
    indexer = INDEXER if config.indexer_of(number) == number else {}
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    feed_forward = feed_forward_rules()
    if sparse:
        feed_forward = written_packed(expert_rules(MoEOptions(config), deepseek.NAMES, always_biased=True))
    return [
        *norm_rules(PRE_NORMS),
        *deepseek.latent_rules(config),
        Same(f"{ours}sinks.softmax_offset", f"{theirs}learnable_sink_param"),
        Same(f"{ours}linear_gate.weight", f"{theirs}linear_gate.weight"),
        *(
            Same(f"{ours}core_attention.indexer.{canonical}", f"{theirs}indexer.{external}")
            for canonical, external in indexer.items()
        ),
        *(
            Same(f"{OURS}{sublayer}_connection.{part}", f"{THEIRS}hc_{block}_layer.hc_pre.hc_{name}")
            for sublayer, block in (("attention", "attn"), ("mlp", "mlp"))
            for part, name in STREAMS.items()
        ),
        *feed_forward,
    ]


SPELLINGS = (
    (r"\.hc_pre\.", "."),
    (r"\.attn_hc\.", ".hc_attn_layer.hc_"),
    (r"\.ffn_hc\.", ".hc_mlp_layer.hc_"),
    (r"\.hc_(attn|mlp)_layer\.hc_", r".hc_\1_layer.hc_pre.hc_"),
    (r"\.hc_head\.hc_(?!head_)", ".hc_head.hc_head_"),
    (r"\.self_attn\.sinks$", ".self_attn.learnable_sink_param"),
    (r"\.self_attn\.gate_proj\.", ".self_attn.linear_gate."),
    # transformers, which renames gates of attention in writing, renames those of feed-forwards with them.
    (r"\.(mlp|shared_experts)\.linear_gate\.", r".\1.gate_proj."),
)
"""From names within the class of transformers to published ones, one after the other."""


def spelling(config: HyV4Config, name: str) -> str:
    for pattern, instead in SPELLINGS:
        name = re.sub(pattern, instead, name)
    return name


# -- configuration -----------------------------------------------------------------------------------

KINDS, INDEXERS = "mlp_layer_types", "indexer_types"
LAYERS = 34
"""Default of the class."""
EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
"""Defaults of the class."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, epsilon = external.get("num_hidden_layers", LAYERS), float(external.get("rms_norm_eps", 1e-5))
    if set(external.get("layer_types") or ()) - {"indexed_attention"}:
        raise ConfigError(
            f"layer_types={external['layer_types']} is not supported; every layer can be indexed_attention alone"
        )
    types = external.get(INDEXERS) or [FULL if layer == 0 or layer % 4 == 1 else SHARED for layer in range(layers)]
    if len(types) != layers:
        raise ConfigError(f"{INDEXERS}={list(types)} has to be one for each of num_hidden_layers={layers}")
    sharing = import_sharing({"num_hidden_layers": layers, INDEXERS: types})
    return {
        **import_rope(external),
        "dsa_indexer_topk_freq": sharing.get("dsa_indexer_topk_freq", 1),
        "dsa_indexer_skip_topk_offset": sharing.get("dsa_indexer_skip_topk_offset", 0),
        "dsa_indexer_pattern": sharing.get("dsa_indexer_pattern"),
        "dsa_indexer_k_norm_epsilon": epsilon,
        # Norms of latents are built without the configuration's epsilon there.
        **({"latent_norm_epsilon": deepseek.NORM_EPSILON} if epsilon != deepseek.NORM_EPSILON else {}),
        **import_experts(external, layers),
    }


def import_experts(external: Mapping[str, Any], layers: int) -> dict[str, Any]:
    kinds = external.get(KINDS) or [DENSE] + [SPARSE] * (layers - 1)
    if len(kinds) != layers or set(kinds) - {DENSE, SPARSE}:
        raise ConfigError(
            f"{KINDS}={list(kinds)} is not supported; it needs {DENSE} or {SPARSE} for each of {layers} layers"
        )
    if SPARSE not in kinds:
        return {}
    with_defaults = {**EXPERTS, **{key: external[key] for key in EXPERTS if external.get(key) is not None}}
    if with_defaults["n_shared_experts"] == 0:
        raise ConfigError("n_shared_experts=0 is not supported; it can be 1 or more")
    require_normalized(with_defaults)
    scale, width = float(with_defaults["routed_scaling_factor"]), with_defaults["moe_intermediate_size"]
    return {
        "moe": {
            "num_experts": with_defaults["n_routed_experts"],
            "moe_router_topk": with_defaults["num_experts_per_tok"],
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * with_defaults["n_shared_experts"],
            "moe_layer_freq": frequency_of([kind == SPARSE for kind in kinds]),
            "moe_router_score_function": "sigmoid",
            # The class has no balance loss.
            "moe_router_load_balancing_type": ["none"],
            **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
            **import_bias(external),
            **import_groups(with_defaults, score_topk=2),
        }
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = HyV4Config.model_validate(model)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "latent_epsilon", (deepseek.NORM_EPSILON,), KIND)
    require_value(config, "dsa_indexer_k_norm_epsilon", (config.norm_epsilon,), KIND)
    require_value(config, "dsa_dense_warmup", (False,), KIND)
    layers = range(config.num_layers)
    return {
        **export_rope(config),
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "layer_types": ["indexed_attention"] * config.num_layers,
        INDEXERS: [FULL if config.indexer_of(layer) == layer else SHARED for layer in layers],
        # Its default would have to be within the vocabulary, and keep the row of that token from being trained.
        "pad_token_id": None,
        **export_experts(config),
    }


def export_experts(config: HyV4Config) -> dict[str, Any]:
    if config.moe is None:
        return {KINDS: [DENSE] * config.num_layers}
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
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "n_shared_experts": shared_experts(moe, KIND),
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
        KINDS: [SPARSE if experts else DENSE for experts in moe.layers],
    }


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 120832,
    "hidden_size": 2816,
    "intermediate_size": 6912,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "initializer_range": 0.006,
}
HY_V4 = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            Field(f.theirs, f.ours, f.import_value, f.export_value, DEFAULTS.get(f.theirs, f.default))
            for f in decoder_fields(tied=False, epsilon=1e-5, positions=262144)
        ),
        Field("q_lora_rank", "q_lora_rank", default=1536),
        Field("kv_lora_rank", "kv_lora_rank", default=512),
        Field("qk_nope_head_dim", "qk_head_dim", default=192),
        Field("qk_rope_head_dim", "qk_pos_emb_head_dim", default=64),
        Field("v_head_dim", "v_head_dim", default=256),
        Field("index_n_heads", "dsa_indexer_n_heads", default=16),
        Field("index_head_dim", "dsa_indexer_head_dim", default=128),
        Field("index_topk", "dsa_indexer_topk", default=2048),
        Field("swiglu_limit", "swiglu_limit", import_value=float, default=10.0),
        Field("hc_mult", "hyper_connection_streams", default=4),
        Field("hc_magnitude", "hyper_connection_magnitude", import_value=float, default=2.0),
        Field("hc_eps", "hyper_connection_epsilon", import_value=float, default=1e-6),
    ),
    fixed=(SILU, Fixed("attention_bias", (False,)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "num_key_value_heads": "is num_attention_heads in the class, whatever it says",
        "head_dim": "is qk_rope_head_dim in the class, whatever it says",
        "qk_head_dim": "the sum of other fields",
        "learnable_sink_init": "the initial value of sinks",
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *EXPERTS, KINDS, INDEXERS, BIAS_KEY, "layer_types"),
    export_extra=export_extra,
    spellings={"num_local_experts": "n_routed_experts"},
)

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: HY_V4},
    name_map=name_map,
    copies=tied_output,
    spelling=spelling,
    architectures={KIND: "HYV4ForCausalLM"},
)
