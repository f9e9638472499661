"""Kimi Linear in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    SIGMOID,
    decoder_map,
    experts,
    feed_forward,
    norms,
)
from mt_models.blocks.gguf_kimi_delta_net import DECAY, LOW_RANK, kimi_delta_net
from mt_models.blocks.hugging_face_decoder import FULL
from mt_models.blocks.hugging_face_delta_net import LINEAR
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.gguf import latent_attention, require_dense_first
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, NegativeExponential, require
from mt_models.kimi_linear.config import KimiLinearConfig

GROUPS = "attention.head_count_kv"
"""1 for layers with latents, 0 for those with a delta rule."""


def name_map(config: KimiLinearConfig) -> NameMap:
    rules: list[Rule] = []
    for number, linear in enumerate(config.linear_layers):
        sparse = config.moe is not None and MoEOptions(config).layers[number]
        block = kimi_delta_net(config, NegativeExponential(*DECAY), LOW_RANK) if linear else latent_attention(config)
        second = experts(MoEOptions(config)) if sparse else feed_forward()
        rules += [rule.for_layer(number) for rule in (*norms(PRE_NORMS), *block, *second)]
    return decoder_map(config, rules)


# -- configuration -----------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    heads, rotated = metadata.need("attention.head_count", int), metadata.need("rope.dimension_count", int)
    several = metadata.need("expert_used_count", int) > 1
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "num_key_value_heads": heads,
        "linear_num_heads": heads,
        "linear_head_dim": metadata.need("kda.head_dim", int),
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel", int),
        "layer_types": [FULL if number else LINEAR for number in metadata.numbers(GROUPS)],
        "q_lora_rank": metadata.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.need("attention.key_length_mla", int) - rotated,
        "v_head_dim": metadata.need("attention.value_length_mla", int),
        "moe_renormalize": several,
        "num_expert_group": 1,
        "topk_group": 1,
    }


def write(external: External) -> dict[str, Any]:
    require_dense_first(external, "kimi-linear")
    require(external, "linear_num_heads", (external["num_attention_heads"],), "kimi-linear")
    require(external, "num_expert_group", (1, None), "kimi-linear")
    require(external, BIAS_KEY, (True, None), "kimi-linear")
    rotated, latent = external["qk_rope_head_dim"], external["kv_lora_rank"]
    values = {
        GROUPS: [1 if kind == FULL else 0 for kind in external["layer_types"]],
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": external["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": external["v_head_dim"],
        "rope.dimension_count": rotated,
        "vocab_size": external["vocab_size"],
        "kda.head_dim": external["linear_head_dim"],
        "ssm.conv_kernel": external["linear_conv_kernel_dim"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": bool(external["moe_renormalize"]),
    }
    if external.get("q_lora_rank"):
        values["attention.q_lora_rank"] = external["q_lora_rank"]
    return values


LENGTH = Key("context_length", "model_max_length")
KIMI_LINEAR = GGUFArchitecture(
    name="kimi-linear",
    model_type="kimi_linear",
    keys=(
        *(key for key in DENSE if key.theirs != LENGTH.theirs),
        LENGTH,
        Key("attention.kv_lora_rank", "kv_lora_rank"),
        Key("leading_dense_block_count", "first_k_dense_replace", int, 0),
        Key("expert_count", "num_experts"),
        Key("expert_used_count", "num_experts_per_token"),
        Key("expert_shared_count", "num_shared_experts"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="kimi_linear", architectures=(KIMI_LINEAR,), name_map=name_map)
