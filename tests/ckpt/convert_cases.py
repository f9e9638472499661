"""Models of every family that conversion tests go over, and small helpers."""

from __future__ import annotations

from typing import Any

SHAPE = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 101}
GROUPED = {**SHAPE, "num_query_groups": 2, "ffn_hidden_size": 48}
GPT2 = {"family": "gpt", **SHAPE, "activation": "gelu_tanh"}
LLAMA = {"family": "llama", **GROUPED}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2_gelu": {**GPT2, "activation": "gelu", "ffn_hidden_size": 40},
    "gpt_bigcode": {**GPT2, "num_query_groups": 1},
    "gpt_neox": {
        "family": "gpt",
        **{key: value for key, value in SHAPE.items() if key != "max_position_embeddings"},
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
    "bloom": {
        "family": "gpt",
        **{key: value for key, value in SHAPE.items() if key != "max_position_embeddings"},
        "position_embedding_type": "alibi",
        "embedding_layernorm": True,
        "activation": "gelu_tanh",
    },
    "llama": LLAMA,
    "llama_tied_biased": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "attention_bias": True,
        "mlp_bias": True,
        "kv_channels": 12,
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": 8.0,
        "original_max_position_embeddings": 32,
    },
    "llama_multi_head": {**LLAMA, "num_query_groups": 4},
    "mistral": {"family": "mistral", **GROUPED, "sliding_window": 5},
    "qwen2": {"family": "qwen", **GROUPED, "add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"family": "qwen", **GROUPED, "add_qkv_bias": False, "qk_layernorm": True, "kv_channels": 12},
    "bert": {"family": "bert", **SHAPE},
    "t5": {"family": "t5", **{k: v for k, v in SHAPE.items() if k != "max_position_embeddings"}},
}
