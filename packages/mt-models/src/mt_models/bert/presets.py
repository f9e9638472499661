"""Published shapes: the original BERTs (post-norm) and Megatron's 345M (pre-norm), and a small one for a CPU."""

from __future__ import annotations

from typing import Any


def _original(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "max_position_embeddings": 512,
            "layernorm_placement": "post",
            "norm_epsilon": 1e-12,
            "use_scaled_init_method": False,
            "vocab_size": vocab,
        },
        "data": {"seq_length": 512},
    }


def _megatron(vocab: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
            "norm_epsilon": 1e-12,
            "vocab_size": vocab,
        },
        "data": {"seq_length": 512},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "bert-base-uncased": _original(12, 768, 12, 30522),
    "bert-base-cased": _original(12, 768, 12, 28996),
    "bert-large-uncased": _original(24, 1024, 16, 30522),
    "bert-large-cased": _original(24, 1024, 16, 28996),
    "megatron-bert-345m-uncased": _megatron(30592),
    "megatron-bert-345m-cased": _megatron(29056),
}
