"""Shapes of well-known models, and the small one that trains in a minute on two CPU cores."""

from __future__ import annotations

from typing import Any


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "max_position_embeddings": 1024,
            "activation": "gelu_tanh",
            "vocab_size": 50257,
        },
        "data": {"seq_length": 1024},
    }


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    shape = _gpt2(layers, hidden, heads)
    shape["model"]["max_position_embeddings"] = 2048
    shape["data"]["seq_length"] = 2048
    return shape


TINY: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
    },
    "data": {"seq_length": 128},
    "train": {"micro_batch_size": 16, "train_iters": 450},
    "optimizer": {"lr": 3e-3, "min_lr": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 20},
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt-tiny": TINY,
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
}
