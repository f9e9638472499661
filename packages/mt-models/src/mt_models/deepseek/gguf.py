"""DeepSeek-V2 and V3 in GGUF, with keys and values of the latents in two tensors, as llama.cpp computes with them."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    SIGMOID,
    SOFTMAX,
    THEIRS,
    decoder_map,
    experts,
    feed_forward,
    norms,
    read_rope,
    tied_output,
    write_rope,
)
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.config import DeepseekConfig
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, LatentUpProjection, Metadata

PROJECTIONS = {
    "self_attention.linear_kv_down_proj": "attn_kv_a_mqa",
    "self_attention.kv_layernorm": "attn_kv_a_norm",
    "self_attention.linear_proj": "attn_output",
}
PLAIN_QUERIES = {"self_attention.linear_q_proj": "attn_q"}
LATENT_QUERIES = {
    "self_attention.linear_q_down_proj": "attn_q_a",
    "self_attention.q_layernorm": "attn_q_a_norm",
    "self_attention.linear_q_up_proj": "attn_q_b",
}


def require_dense_first(external: External, architecture: str) -> None:
    """Raise ConfigError for `mlp_layer_types` with dense layers behind others: a file has the number of those that come
    first."""
    kinds = list(external["mlp_layer_types"])
    if kinds != sorted(kinds):
        raise ConfigError(
            f"mlp_layer_types={kinds} cannot be written as GGUF of the architecture {architecture}, whose dense layers "
            "are the first ones"
        )


def name_map(config: DeepseekConfig) -> NameMap:
    layers = [rule.for_layer(number) for number in range(config.num_layers) for rule in layer_rules(config, number)]
    return decoder_map(config, layers)


def layer_rules(config: DeepseekConfig, number: int) -> list[Rule]:
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    second = experts(MoEOptions(config)) if sparse else feed_forward()
    return [*norms(PRE_NORMS), *latent_attention(config), *second]


def latent_attention(config: Any) -> list[Rule]:
    queries = PLAIN_QUERIES if config.q_lora_rank is None else LATENT_QUERIES
    up = LatentUpProjection(
        f"{OURS}self_attention.linear_kv_up_proj.weight",
        (f"{THEIRS}attn_k_b.weight", f"{THEIRS}attn_v_b.weight"),
        heads=config.num_attention_heads,
        key_size=config.qk_head_dim,
    )
    return [*norms(PROJECTIONS), *norms(queries), up]


def _is_v3(metadata: Metadata) -> bool:
    return metadata.get("expert_gating_func", int) == SIGMOID


def read(metadata: Metadata) -> dict[str, Any]:
    rotated = metadata.need("rope.dimension_count", int)
    rope = read_rope(metadata, rotated)
    return {
        **rope,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "num_key_value_heads": metadata.need("attention.head_count", int),
        "q_lora_rank": metadata.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.need("attention.key_length_mla", int) - rotated,
        "v_head_dim": metadata.need("attention.value_length_mla", int),
        "n_group": metadata.get("expert_group_count", int) or 1,
        "topk_group": metadata.get("expert_group_used_count", int) or 1,
    }


def read_v2(metadata: Metadata) -> dict[str, Any]:
    grouped = (metadata.get("expert_group_count", int) or 1) > 1
    method = {"topk_method": "group_limited_greedy" if grouped else "greedy", "scoring_func": "softmax"}
    return {**read(metadata), **method, "norm_topk_prob": False, "moe_layer_freq": 1}


def read_v3(metadata: Metadata) -> dict[str, Any]:
    norm = bool(metadata.get("expert_weights_norm", bool))
    biased = any(metadata.has_tensor(f"blk.{i}.exp_probs_b.bias") for i in range(metadata.need("block_count", int)))
    bias = {} if biased else {"moe_router_enable_expert_bias": False}
    return {**read(metadata), **bias, "norm_topk_prob": norm, "num_nextn_predict_layers": 0}


def write(external: External) -> dict[str, Any]:
    if not external.get("n_routed_experts"):
        raise ConfigError("model.moe=null cannot be written as GGUF of the architecture deepseek2, which has experts")
    scaling = external.get("rope_scaling") or {}
    rotated, latent = external["qk_rope_head_dim"], external["kv_lora_rank"]
    values = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": external["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": external["v_head_dim"],
        "rope.dimension_count": rotated,
        "vocab_size": external["vocab_size"],
        **write_rope(external),
        "expert_weights_norm": bool(external.get("norm_topk_prob", False)),
        "expert_gating_func": SIGMOID if external["model_type"] == "deepseek_v3" else SOFTMAX,
    }
    if external.get("q_lora_rank"):
        values["attention.q_lora_rank"] = external["q_lora_rank"]
    if (external.get("n_group") or 1) > 1:
        values |= {"expert_group_count": external["n_group"], "expert_group_used_count": external["topk_group"]}
    if scaling.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * float(scaling["mscale_all_dim"])
    return values


KEYS = (
    *DENSE,
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("leading_dense_block_count", "first_k_dense_replace", int, 0),
    Key("expert_count", "n_routed_experts"),
    *EXPERT_COUNTS,
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
)
V2 = GGUFArchitecture(
    "deepseek2", "deepseek_v2", KEYS, read_v2, write, lambda metadata: not _is_v3(metadata), predicts=False
)
V3 = GGUFArchitecture("deepseek2", "deepseek_v3", KEYS, read_v3, write, _is_v3, predicts=False)

GGUF = GGUFFamily(family="deepseek", architectures=(V2, V3), name_map=name_map, copies=tied_output)
