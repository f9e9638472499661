"""GLM-5.3-Flash, text, in GGUF: llama.cpp's glm5-next."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    SIGMOID,
    THEIRS,
    decoder_map,
    experts,
    feed_forward,
    norms,
)
from mt_models.blocks.gguf_kimi_delta_net import DECAY, LOW_RANK, kimi_delta_net
from mt_models.blocks.hugging_face_delta_net import LINEAR
from mt_models.blocks.hugging_face_moe import BIAS_KEY, renamed
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.gguf import latent_attention, require_dense_first
from mt_models.deepseek.hugging_face import KINDS
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, NegativeExponential, require
from mt_models.glm5_next.config import Glm5NextConfig
from mt_models.glm5_next.hugging_face import COUNT, FINAL_NORM, INDEXED, KIND, STREAMS

NAME = "glm5-next"

# -- tensors -----------------------------------------------------------------------------------------

INDEXER = {
    "linear_wq_b.weight": "indexer.attn_q_b.weight",
    "linear_wk.weight": "indexer.attn_k.weight",
    "k_norm.weight": "indexer.k_norm.weight",
    "k_norm.bias": "indexer.k_norm.bias",
    "linear_weights_proj.weight": "indexer.proj.weight",
    "linear_gate.weight": "indexer_compressor_gate.weight",
    "position_bias": "indexer_compressor_ape.weight",
}
PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}
UNREAD = [f"blk.*.nextn.{part}.weight" for part in ("embed_tokens", "shared_head_head")]
"""Within layers of multi-token prediction, in whose place those of the model are taken."""


def name_map(config: Glm5NextConfig) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in _layer(config, number)]
    predicted = [rule for depth in range(config.mtp_num_layers) for rule in _prediction_rules(config, depth)]
    names = decoder_map(config, [*layers, *predicted], ignored=UNREAD)
    others = [rule for rule in names.rules if rule.ours != "decoder.final_layernorm.weight"]
    return NameMap([*others, Same(FINAL_NORM, "output_norm.weight")], 0, names.ignored)


def _layer(config: Glm5NextConfig, number: int) -> list[Rule]:
    block = _delta_net(config) if config.linear_layers[number] else _sparse_attention(config)
    rules = (*norms(PRE_NORMS), *_connections(), *block, *_feed_forward(config, number))
    return [rule.for_layer(number) for rule in rules]


def _feed_forward(config: Glm5NextConfig, number: int) -> list[Rule]:
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    return experts(MoEOptions(config)) if sparse else feed_forward()


def _connections() -> list[Rule]:
    return [
        Same(f"{OURS}{ours}_connection.{canonical}", f"{THEIRS}hc_{theirs}_{external}.weight")
        for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
        for canonical, external in STREAMS.items()
    ]


def _delta_net(config: Glm5NextConfig) -> list[Rule]:
    return kimi_delta_net(config, NegativeExponential(*DECAY, there=()), LOW_RANK)


def _sparse_attention(config: Glm5NextConfig) -> list[Rule]:
    ours = f"{OURS}self_attention.indexer."
    indexer = [Same(ours + canonical, THEIRS + external) for canonical, external in INDEXER.items()]
    return [*latent_attention(config), *indexer]


def _prediction_rules(config: Glm5NextConfig, depth: int) -> list[Rule]:
    """Layers of multi-token prediction, which have one residual stream, follow the others."""
    number, prefix = config.num_layers + depth, f"mtp.layers.{depth}."
    counted = config.with_predicted_layers()
    rules = (*norms(PRE_NORMS), *_sparse_attention(counted), *_feed_forward(counted, number))
    layer = OURS.replace("{i}", str(number))
    return [
        *(Same(f"{prefix}{ours}.weight", f"blk.{number}.nextn.{name}.weight") for ours, name in PREDICTION.items()),
        *(renamed(rule.for_layer(number), layer, f"{prefix}mtp_model_layer.") for rule in rules),
    ]


# -- configuration -----------------------------------------------------------------------------------

GROUPS = "attention.head_count_kv"
"""1 for layers with latents, 0 for those with a delta rule."""
BOUND, PREDICTING = "kda.gate_lower_bound", "nextn_predict_layers"
CLAMP, SHARED_CLAMP = "swiglu_clamp_exp", "swiglu_clamp_shexp"
INDEXER_EPSILON = 1e-6
"""Epsilon of the norm of the indexer's keys."""
STREAM_COUNT = 4
"""Residual streams, which llama.cpp has fixed."""


def read(metadata: Metadata) -> dict[str, Any]:
    predicted = metadata.get(PREDICTING, int) or 0
    layers, heads = metadata.need("block_count", int) - predicted, metadata.need("attention.head_count", int)
    sparse = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    values = {
        "num_hidden_layers": layers,
        COUNT: predicted,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "num_key_value_heads": heads,
        "linear_num_heads": heads,
        "linear_head_dim": metadata.need("kda.head_dim", int),
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel", int),
        "linear_lower_bound": metadata.get(BOUND, float),
        "layer_types": [INDEXED if number else LINEAR for number in metadata.numbers(GROUPS)[:layers]],
        "indexer_types": ["full"] * layers,
        "qk_nope_head_dim": metadata.need("attention.key_length_mla", int),
        "v_head_dim": metadata.need("attention.value_length_mla", int),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool)),
        "n_group": metadata.get("expert_group_count", int) or 1,
        "topk_group": metadata.get("expert_group_used_count", int) or 1,
        KINDS: ["sparse" if there else "dense" for there in sparse],
    }
    limits = metadata.decimals(CLAMP)
    return {**values, "swiglu_limit": limits[0]} if limits else values


def write(external: External) -> dict[str, Any]:
    _require_expressed(external)
    latent, predicted = external["kv_lora_rank"], int(external.get(COUNT) or 0)
    layers = external["num_hidden_layers"] + predicted
    groups = [0 if kind == LINEAR else 1 for kind in external["layer_types"]]
    limits = [float(external["swiglu_limit"])] * layers
    values = {
        "block_count": layers,
        # Layers of multi-token prediction have latents.
        GROUPS: groups + [1] * predicted,
        "attention.key_length": latent,
        "attention.value_length": latent,
        "attention.key_length_mla": external["qk_nope_head_dim"],
        "attention.value_length_mla": external["v_head_dim"],
        "attention.layer_norm_epsilon": INDEXER_EPSILON,
        "attention.indexer.kpool_select_tail": True,
        "rope.dimension_count": 0,
        "vocab_size": external["vocab_size"],
        "kda.head_dim": external["linear_head_dim"],
        "ssm.conv_kernel": external["linear_conv_kernel_dim"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": bool(external["norm_topk_prob"]),
        CLAMP: limits,
        SHARED_CLAMP: limits,
    }
    if external["linear_lower_bound"] is not None:
        values[BOUND] = float(external["linear_lower_bound"])
    if (external.get("n_group") or 1) > 1:
        values |= {"expert_group_count": external["n_group"], "expert_group_used_count": external["topk_group"]}
    # Without the key a file has no such layers.
    return {**values, PREDICTING: predicted} if predicted else values


def _require_expressed(external: External) -> None:
    require(external, "hc_mult", (STREAM_COUNT,), NAME)
    require(external, "linear_num_heads", (external["num_attention_heads"],), NAME)
    require(external, BIAS_KEY, (True, None), NAME)
    require_dense_first(external, NAME)
    require({"experts": "n_routed_experts" in external}, "experts", (True,), NAME)


GLM5_NEXT = GGUFArchitecture(
    name=NAME,
    model_type=KIND,
    keys=(
        *DENSE,
        Key("attention.q_lora_rank", "q_lora_rank"),
        Key("attention.kv_lora_rank", "kv_lora_rank"),
        Key("attention.indexer.head_count", "index_n_heads"),
        Key("attention.indexer.key_length", "index_head_dim"),
        Key("attention.indexer.top_k", "index_topk"),
        Key("attention.indexer.kpool", "index_kpool"),
        Key("hyper_connection.count", "hc_mult"),
        Key("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        Key("hyper_connection.epsilon", "hc_eps", float),
        Key("expert_count", "n_routed_experts"),
        *EXPERT_COUNTS,
        Key("expert_shared_count", "n_shared_experts"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
    ),
    read=read,
    write=lambda external: {**write(external), "leading_dense_block_count": external[KINDS].count("dense")},
)

GGUF = GGUFFamily(family="glm5_next", architectures=(GLM5_NEXT,), name_map=name_map)
