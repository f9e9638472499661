"""Qwen2-MoE, Qwen3-MoE and GLM-4.5 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    NORMS_BEHIND_ATTENTION,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    THEIRS,
    SharedGate,
    attention,
    decoder_map,
    experts,
    mixed_feed_forward,
    norms,
    read_even_shape,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.gguf_tower import read_as_text
from mt_models.blocks.hugging_face_moe import renamed
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.qwen_moe.config import QwenMoeConfig
from mt_models.qwen_moe.glm4_moe import COUNT, KIND, is_glm4_moe


def name_map(config: QwenMoeConfig) -> NameMap:
    glm = is_glm4_moe(config.moe)
    layer = [
        *norms(NORMS_BEHIND_ATTENTION if glm else PRE_NORMS),
        *(norms(QK_NORMS) if config.qk_layernorm else ()),
        *attention(config, bias=config.add_qkv_bias),
        *mixed_feed_forward(config),
    ]
    if MoEOptions(config)["moe_shared_expert_gate"]:
        layer.append(SharedGate(f"{OURS}mlp.shared_experts.gate_weight", f"{THEIRS}ffn_gate_inp_shexp.weight"))
    # Layers of multi-token prediction which a file counts follow the others.
    last = config.num_layers + config.mtp_num_layers
    unread = [f"blk.{last - 1}.nextn.{part}.weight" for part in ("embed_tokens", "shared_head_head")]
    return decoder_map(config, [*layer, *_prediction_rules(config)], ignored=unread)


def _prediction_rules(config: QwenMoeConfig) -> list[Rule]:
    rules: list[Rule] = []
    heads = norms(QK_NORMS) if config.qk_layernorm else []
    inside = [*norms(NORMS_BEHIND_ATTENTION), *heads, *attention(config, bias=config.add_qkv_bias)]
    for depth in range(config.mtp_num_layers):
        number, prefix = config.num_layers + depth, f"mtp.layers.{depth}."
        layer = [rule.for_layer(number) for rule in (*inside, *experts(MoEOptions(config)))]
        rules += [
            Same(f"{prefix}{ours}.weight", f"blk.{number}.nextn.{theirs}.weight") for ours, theirs in PREDICTION.items()
        ]
        rules += [renamed(rule, OURS.replace("{i}", str(number)), f"{prefix}mtp_model_layer.") for rule in layer]
    return rules


PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head_norm"}
PREDICTING = "nextn_predict_layers"


def read_qwen2(metadata: Metadata) -> dict[str, Any]:
    return {**read_even_shape(metadata), "decoder_sparse_step": 1, "norm_topk_prob": False}


def read_qwen3(metadata: Metadata) -> dict[str, Any]:
    return {**read_shape(metadata), "decoder_sparse_step": 1, "norm_topk_prob": True}


def write_qwen(external: External) -> dict[str, Any]:
    architecture = str(external["model_type"]).replace("_", "")
    require(external, "mlp_only_layers", ([],), architecture)
    require(external, "norm_topk_prob", (architecture == "qwen3moe",), architecture)
    return write_shape(external)


EXPERTS = (
    Key("expert_count", "num_experts"),
    *EXPERT_COUNTS,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
)
QWEN2 = GGUFArchitecture(
    name="qwen2moe",
    model_type="qwen2_moe",
    keys=(*DENSE, *EXPERTS, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
    read=read_qwen2,
    write=write_qwen,
)
QWEN3 = GGUFArchitecture(
    name="qwen3moe", model_type="qwen3_moe", keys=(*DENSE, *EXPERTS), read=read_qwen3, write=write_qwen
)


def read_glm(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    rotated = metadata.get("rope.dimension_count", int) or shape["head_dim"]
    predicted = metadata.get(PREDICTING, int) or 0
    return {
        **shape,
        "num_hidden_layers": metadata.need("block_count", int) - predicted,
        COUNT: predicted,
        "partial_rotary_factor": rotated / shape["head_dim"],
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool)),
    }


def write_glm(external: External) -> dict[str, Any]:
    shape = write_shape(external)
    rotated = int(shape["attention.key_length"] * float(external.get("partial_rotary_factor", 1.0)))
    norm, predicted = bool(external.get("norm_topk_prob", True)), int(external.get(COUNT) or 0)
    values = {**shape, "rope.dimension_count": rotated, "expert_gating_func": SIGMOID, "expert_weights_norm": norm}
    # Without the key a file has no such layers.
    if predicted:
        values |= {"block_count": external["num_hidden_layers"] + predicted, PREDICTING: predicted}
    return values


GLM4 = GGUFArchitecture(
    name="glm4moe",
    model_type=KIND,
    keys=(
        *DENSE,
        Key("expert_count", "n_routed_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "n_shared_experts"),
        Key("leading_dense_block_count", "first_k_dense_replace"),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
        Key("expert_group_count", "n_group", int, 1),
        Key("expert_group_used_count", "topk_group", int, 1),
    ),
    read=read_glm,
    write=write_glm,
)

# The decoder of a model with an image tower, whose positions are the same in texts; it is read and not written.
WITH_TOWER = GGUFArchitecture(
    "qwen3vlmoe",
    QWEN3.model_type,
    QWEN3.keys,
    read_as_text("qwen3vlmoe", read_qwen3),
    write_qwen,
    applies=lambda external: False,
)

GGUF = GGUFFamily(
    family="qwen_moe", architectures=(QWEN2, QWEN3, GLM4, WITH_TOWER), name_map=name_map, copies=tied_output
)
