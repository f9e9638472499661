"""DeepSeek-V4 in GGUF, without multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    EPSILON,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    SIZES,
    THEIRS,
    experts,
    norms,
    read_rope,
    require_scaling,
    write_rope,
)
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek_v4.config import DeepseekV4Config
from mt_models.deepseek_v4.hugging_face import INDEXED, KIND, ExpertTable
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

NAME = "deepseek4"


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NarrowExpertTable(ExpertTable):
    """In int32 there."""

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [table.to(torch.int32) for table in super().export_value(tensor)]


ATTENTION = {
    "linear_q_down_proj": "attn_q_a",
    "q_layernorm": "attn_q_a_norm",
    "linear_q_up_proj": "attn_q_b",
    "linear_kv_proj": "attn_kv",
    "kv_layernorm": "attn_kv_a_norm",
    "linear_o_group_proj": "attn_output_a",
    "linear_proj": "attn_output_b",
}
COMPRESSOR = {"linear_kv.weight": "kv", "linear_gate.weight": "gate", "position_bias": "ape", "norm.weight": "norm"}
INDEXER = {"linear_wq_b": "indexer.attn_q_b", "linear_weights_proj": "indexer.proj"}
STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
PREDICTED_LAYERS = 3
"""The most layers of multi-token prediction whose tensors a file has; they are left out."""


def name_map(config: DeepseekV4Config) -> NameMap:
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "token_embd.weight"),
        Same("output.norm.weight", "output_norm.weight"),
        *_streams("output.hyper_head.", "output_hc_"),
        Same("output_layer.weight", "output.weight"),
        *(rule for number in range(config.num_layers) for rule in _layer(config, number)),
    ]
    unread = [f"blk.{config.num_layers + depth}.*" for depth in range(PREDICTED_LAYERS)]
    return NameMap(rules, 0, ignored=unread)


def _layer(config: DeepseekV4Config, number: int) -> list[Rule]:
    attention = f"{OURS}self_attention."
    rules: list[Rule] = [
        *norms(PRE_NORMS),
        *norms(ATTENTION, ours=attention),
        Same(f"{attention}core_attention.softmax_offset", f"{THEIRS}attn_sinks.weight"),
        *_streams(f"{OURS}attention_connection.", f"{THEIRS}hc_attn_"),
        *_streams(f"{OURS}mlp_connection.", f"{THEIRS}hc_ffn_"),
        *_experts(MoEOptions(config), number),
    ]
    if config.compression_of(number):
        rules += _compressor(f"{attention}compressor.", f"{THEIRS}attn_compressor_")
    if config.is_indexed(number):
        rules += _compressor(f"{attention}indexer.compressor.", f"{THEIRS}indexer_compressor_")
        rules += norms(INDEXER, ours=f"{attention}indexer.")
    return [rule.for_layer(number) for rule in rules]


def _streams(ours: str, theirs: str) -> list[Rule]:
    return [Same(ours + own, f"{theirs}{other}.weight") for own, other in STREAMS.items()]


def _compressor(ours: str, theirs: str) -> list[Rule]:
    return [Same(ours + own, f"{theirs}{other}.weight") for own, other in COMPRESSOR.items()]


def _experts(moe: MoEOptions, number: int) -> list[Rule]:
    """The first layers choose experts by the token, from a table in place of a bias."""
    if number >= moe["moe_router_hash_layers"]:
        return experts(moe)
    table = f"{OURS}mlp.router.token_experts", f"{THEIRS}ffn_gate_tid2eid.weight"
    others = [rule for rule in experts(moe) if not rule.ours.endswith("expert_bias")]
    return [*others, NarrowExpertTable(*table, experts=moe.num_experts)]


# -- configuration -----------------------------------------------------------------------------------

RATIOS, ROTATED, PREDICTED = "attention.compress_ratios", "rope.dimension_count", "num_nextn_predict_layers"
INDEXED_RATIO, RATIO = 4, 128
SQUARE_ROOT_OF_SOFTPLUS = 4
"""Value of expert_gating_func."""
AUX_LOSS, AUX_LOSS_KEY = "router_aux_loss_coef", "expert_aux_loss_coefficient"
"""The key of config.json, and that of the file: one of mt's, which other programs leave unread."""
LIMIT = 10.0
"""Limit of the activations of every layer."""


def read(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.need("block_count", int) - (metadata.get("nextn_predict_layers", int) or 0)
    rotated = metadata.need(ROTATED, int)
    coefficient = metadata.get(AUX_LOSS_KEY, float)
    return {
        **({} if coefficient is None else {AUX_LOSS: coefficient}),
        **read_rope(metadata, rotated),
        "num_hidden_layers": layers,
        PREDICTED: 0,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "qk_rope_head_dim": rotated,
        "compress_ratios": metadata.numbers(RATIOS)[:layers],
    }


def write(external: External) -> dict[str, Any]:
    _require_expressed(external)
    limits = [LIMIT] * external["num_hidden_layers"]
    coefficient = external.get(AUX_LOSS)
    return {
        **({} if coefficient is None else {AUX_LOSS_KEY: float(coefficient)}),
        **write_rope(external),
        ROTATED: external["qk_rope_head_dim"],
        RATIOS: list(external["compress_ratios"]),
        "attention.head_count_kv": 1,
        "attention.value_length": external["head_dim"],
        "vocab_size": external["vocab_size"],
        "expert_gating_func": SQUARE_ROOT_OF_SOFTPLUS,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def _require_expressed(external: External) -> None:
    require(external, BIAS_KEY, (True, None), NAME)
    require_scaling(external, ("default", "yarn"), NAME)
    # Queries and keys are not lengthened.
    require(external["rope_scaling"] or {}, "attention_factor", (None,), NAME)
    require(external["compress_rates"], INDEXED, (INDEXED_RATIO,), NAME)
    for layer, ratio in enumerate(external["compress_ratios"]):
        require({f"compress_ratios[{layer}]": ratio}, f"compress_ratios[{layer}]", (0, INDEXED_RATIO, RATIO), NAME)


DEEPSEEK4 = GGUFArchitecture(
    name=NAME,
    model_type=KIND,
    predicts=False,
    keys=(
        *SIZES,
        EPSILON,
        Key("attention.key_length", "head_dim"),
        Key("attention.q_lora_rank", "q_lora_rank"),
        Key("attention.output_group_count", "o_groups"),
        Key("attention.output_lora_rank", "o_lora_rank"),
        Key("attention.sliding_window", "sliding_window"),
        Key("attention.indexer.head_count", "index_n_heads"),
        Key("attention.indexer.key_length", "index_head_dim"),
        Key("attention.indexer.top_k", "index_topk"),
        Key("attention.compress_rope_freq_base", "compress_rope_theta", float),
        Key("hyper_connection.count", "hc_mult"),
        Key("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        Key("hyper_connection.epsilon", "hc_eps", float),
        Key("hash_layer_count", "num_hash_layers", int, 0),
        Key("expert_count", "n_routed_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "n_shared_experts"),
        Key("expert_weights_scale", "routed_scaling_factor", float),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family=KIND, architectures=(DEEPSEEK4,), name_map=name_map)
