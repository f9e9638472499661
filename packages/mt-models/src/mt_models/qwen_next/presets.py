"""Published sizes of Qwen3-Next, Qwen3.5 and Qwen3.6 (base models)."""

from __future__ import annotations

from typing import Any

POSITIONS = 262144


def _qwen_next(layers: int, hidden: int, heads: int, groups: int, values: int, **keys: Any) -> dict[str, Any]:
    """heads, groups: of attention. values: value heads of a gated delta net, which has 16 key heads in all sizes."""
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": 256,
            "linear_num_value_heads": values,
            "max_position_embeddings": POSITIONS,
            "rotary_base": 10000000.0,
            "mtp_num_layers": 1,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _experts(num: int, topk: int, ffn: int) -> dict[str, Any]:
    """Experts and a shared one of the same width."""
    return {
        "num_experts": num,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": ffn,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": ["global_aux_loss"],
        "moe_aux_loss_coeff": [0.001],
    }


def _dense(
    layers: int, hidden: int, heads: int, groups: int, values: int, ffn: int, *, tied: bool = False
) -> dict[str, Any]:
    keys = {"ffn_hidden_size": ffn, "vocab_size": 248320, "untie_embeddings_and_output_weights": not tied}
    return _qwen_next(layers, hidden, heads, groups, values, **keys)


def _sparse(
    layers: int,
    hidden: int,
    heads: int,
    values: int,
    experts: int,
    topk: int,
    ffn: int,
    vocab: int = 248320,
    **keys: Any,
) -> dict[str, Any]:
    moe = _experts(experts, topk, ffn)
    return _qwen_next(layers, hidden, heads, 2, values, ffn_hidden_size=ffn, vocab_size=vocab, moe=moe, **keys)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-next-80b-a3b": _sparse(48, 2048, 16, 32, 512, 10, 512, 151936, generation="qwen3_next"),
    "qwen3.5-0.8b": _dense(24, 1024, 8, 2, 16, 3584, tied=True),
    "qwen3.5-2b": _dense(24, 2048, 8, 2, 16, 6144, tied=True),
    "qwen3.5-4b": _dense(32, 2560, 16, 4, 32, 9216, tied=True),
    "qwen3.5-9b": _dense(32, 4096, 16, 4, 32, 12288),
    "qwen3.5-27b": _dense(64, 5120, 24, 4, 48, 17408),
    "qwen3.5-35b-a3b": _sparse(40, 2048, 16, 32, 256, 8, 512),
    "qwen3.5-122b-a10b": _sparse(48, 3072, 32, 64, 256, 8, 1024),
    "qwen3.5-397b-a17b": _sparse(60, 4096, 32, 64, 512, 10, 1024),
    "qwen3.6-27b": _dense(64, 5120, 24, 4, 48, 17408),
    "qwen3.6-35b-a3b": _sparse(40, 2048, 16, 32, 256, 8, 512),
}
