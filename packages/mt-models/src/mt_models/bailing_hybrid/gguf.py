"""Ling 3.0 in GGUF: llama.cpp's bailingmoe3."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule, Same
from mt_models.bailing_hybrid.config import BailingHybridConfig
from mt_models.bailing_hybrid.hugging_face import COUNT, KIND, LIMITS
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    SIGMOID,
    decoder_map,
    experts,
    feed_forward,
    norms,
    read_rope,
    require_scaling,
    write_rope,
)
from mt_models.blocks.gguf_kimi_delta_net import DECAY, kimi_delta_net
from mt_models.blocks.hugging_face_decoder import FULL
from mt_models.blocks.hugging_face_delta_net import LINEAR
from mt_models.blocks.hugging_face_moe import BIAS_KEY, renamed
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.gguf import latent_attention, require_dense_first
from mt_models.deepseek.hugging_face import KINDS
from mt_models.gguf import Exponential, External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

NAME = "bailingmoe3"

# -- tensors -----------------------------------------------------------------------------------------

DELTA_GATES = {"forget_proj.weight": "ssm_f_a.weight", "gate_proj.weight": "ssm_g_a.weight"}
PREDICTION = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "final_layernorm": "layer_output_norm",
}


def name_map(config: BailingHybridConfig) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in _layer(config, number)]
    predicted = [rule for depth in range(config.mtp_num_layers) for rule in _prediction_rules(config, depth)]
    return decoder_map(config, [*layers, *predicted])


def _layer(config: BailingHybridConfig, number: int) -> list[Rule]:
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    block = _delta_net(config) if config.linear_layers[number] else _attention(config)
    second = experts(MoEOptions(config)) if sparse else feed_forward()
    return [rule.for_layer(number) for rule in (*norms(PRE_NORMS), *block, *second)]


def _delta_net(config: BailingHybridConfig) -> list[Rule]:
    return kimi_delta_net(config, Exponential(*DECAY), DELTA_GATES)


def _attention(config: BailingHybridConfig) -> list[Rule]:
    return [*latent_attention(config), *norms({"self_attention.linear_gate": "attn_gate"})]


def _prediction_rules(config: BailingHybridConfig, depth: int) -> list[Rule]:
    """Layers of multi-token prediction follow the others."""
    number, prefix = config.num_layers + depth, f"mtp.layers.{depth}."
    layer = OURS.replace("{i}", str(number))
    return [
        *(Same(f"{prefix}{ours}.weight", f"blk.{number}.{name}.weight") for ours, name in PREDICTION.items()),
        *(renamed(rule, layer, f"{prefix}mtp_model_layer.") for rule in _layer(config.with_predicted_layers(), number)),
    ]


# -- configuration -----------------------------------------------------------------------------------

GROUPS = "attention.head_count_kv"
"""1 for layers with latents, 0 for those with a delta rule."""
BOUND, PREDICTING, WIDTH = "kda.gate_lower_bound", "nextn_predict_layers", "expert_feed_forward_length"
CLAMPS = {
    LIMITS["expert_swiglu_limits"]: "swiglu_clamp_exp",
    LIMITS["shared_expert_swiglu_limits"]: "swiglu_clamp_shexp",
}


def read(metadata: Metadata) -> dict[str, Any]:
    predicted = metadata.get(PREDICTING, int) or 0
    layers = metadata.need("block_count", int) - predicted
    heads, rotated = metadata.need("attention.head_count", int), metadata.need("rope.dimension_count", int)
    sparse = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    return {
        **read_rope(metadata, rotated),
        "num_hidden_layers": layers,
        COUNT: predicted,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "num_key_value_heads": heads,
        "head_dim": metadata.need("kda.head_dim", int),
        "linear_num_heads": heads,
        "short_conv_kernel_size": metadata.need("ssm.conv_kernel", int),
        "layer_types": [FULL if number else LINEAR for number in metadata.numbers(GROUPS)[:layers]],
        "kda_safe_gate": True,
        "kda_lower_bound": metadata.need(BOUND, float),
        "q_lora_rank": metadata.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.need("attention.key_length_mla", int) - rotated,
        "v_head_dim": metadata.need("attention.value_length_mla", int),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool)),
        "n_group": metadata.get("expert_group_count", int) or 1,
        "topk_group": metadata.get("expert_group_used_count", int) or 1,
        KINDS: ["sparse" if there else "dense" for there in sparse],
        **{ours: metadata.decimals(theirs)[:layers] or None for ours, theirs in CLAMPS.items()},
    }


def write(external: External) -> dict[str, Any]:
    _require_expressed(external)
    rotated, latent, predicted = external["qk_rope_head_dim"], external["kv_lora_rank"], int(external.get(COUNT) or 0)
    groups = [1 if kind == FULL else 0 for kind in external["layer_types"]]
    values = {
        **write_rope(external),
        "block_count": external["num_hidden_layers"] + predicted,
        # Layers of multi-token prediction have latents.
        GROUPS: groups + [1] * predicted,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": external["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": external["v_head_dim"],
        "rope.dimension_count": rotated,
        "vocab_size": external["vocab_size"],
        "kda.head_dim": external["linear_head_dim"],
        "kda.safe_gate": True,
        BOUND: float(external["kda_lower_bound"]),
        "ssm.conv_kernel": external["linear_conv_kernel_dim"],
        "expert_shared_feed_forward_length": external["num_shared_experts"] * external["moe_intermediate_size"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": bool(external["norm_topk_prob"]),
    }
    if external.get("q_lora_rank"):
        values["attention.q_lora_rank"] = external["q_lora_rank"]
    if (external.get("n_group") or 1) > 1:
        values |= {"expert_group_count": external["n_group"], "expert_group_used_count": external["topk_group"]}
    for ours, theirs in CLAMPS.items():
        if limits := external.get(ours):
            values[theirs] = [float(limit) for limit in limits] + [0.0] * predicted
    # Without the key a file has no such layers.
    return {**values, PREDICTING: predicted} if predicted else values


def _require_expressed(external: External) -> None:
    require(external, "kda_safe_gate", (True,), NAME)
    require(external, "linear_num_heads", (external["num_attention_heads"],), NAME)
    require(external, BIAS_KEY, (True, None), NAME)
    require({"experts": "num_experts" in external}, "experts", (True,), NAME)
    require_scaling(external, ("default", "linear", "yarn"), NAME)
    require_dense_first(external, NAME)


BAILING = GGUFArchitecture(
    name=NAME,
    model_type=KIND,
    keys=(
        *DENSE,
        Key("attention.kv_lora_rank", "kv_lora_rank"),
        Key("leading_dense_block_count", "first_k_dense_replace"),
        Key("expert_count", "num_experts"),
        *EXPERT_COUNTS,
        Key("expert_shared_count", "num_shared_experts"),
        Key(WIDTH, "moe_intermediate_size"),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family=KIND, architectures=(BAILING,), name_map=name_map)
