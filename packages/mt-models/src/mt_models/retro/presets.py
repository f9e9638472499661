"""Shapes: the decoders of Borgeaud et al. (2022), table 1, the one of Megatron's example of pretraining, and a small
one that trains in minutes on two CPU cores.

The encoder of neighbours is as wide as the decoder, as in Megatron; the paper's is 896 wide in all sizes, and its
attention has relative positions, which are learned positions here.
"""

from __future__ import annotations

from typing import Any


def _paper(layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "kv_channels": head_dim,
            "max_position_embeddings": 2048,
            "normalization": "RMSNorm",
            "vocab_size": 128000,
        },
        "data": {"dataset_type": "retro", "seq_length": 2048},
    }


MEGATRON: dict[str, Any] = {
    "model": {
        "num_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.007,
    },
    "data": {"dataset_type": "retro", "seq_length": 512},
}

TINY: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "retro_chunk_length": 32,
        "retro_cross_attention_layers": [3],
    },
    "data": {"dataset_type": "builtin_retro", "seq_length": 128, "retro_chunk_length": 32},
    "train": {"micro_batch_size": 16, "train_iters": 300},
    "optimizer": {"lr": 3e-3, "min_lr": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 20},
}

PRESETS: dict[str, dict[str, Any]] = {
    "retro-tiny": TINY,
    "retro-172m": _paper(12, 896, 16, 64),
    "retro-425m": _paper(12, 1536, 12, 128),
    "retro-1.5b": _paper(24, 2048, 16, 128),
    "retro-7.5b": _paper(32, 4096, 32, 128),
    "retro-megatron-353m": MEGATRON,
}
