"""Configuration of the Llama family, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_models.blocks.config import RMSNormDecoderConfig
from mt_models.blocks.megatron_decoder import rotary_map


class LlamaConfig(RMSNormDecoderConfig):
    """Llama (Touvron et al., 2023; Llama 2, 2023; The Llama 3 Herd of Models, 2024)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""

    @property
    def add_bias_linear(self) -> bool:
        return self.mlp_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


# -- published sizes ---------------------------------------------------------------------------------


def _llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, positions: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "max_position_embeddings": positions,
            "norm_epsilon": 1e-5,
            **keys,
        },
        "data": {"seq_length": min(positions, 8192)},
    }


def _llama1(layers: int, hidden: int, heads: int, ffn: int, epsilon: float = 1e-6) -> dict[str, Any]:
    return _llama(layers, hidden, heads, heads, ffn, 2048, vocab_size=32000, norm_epsilon=epsilon)


def _llama2(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    return _llama(layers, hidden, heads, groups, ffn, 4096, vocab_size=32000)


def _llama3(layers: int, hidden: int, heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return _llama(layers, hidden, heads, 8, ffn, 8192, **{"vocab_size": 128256, "rotary_base": 500000.0, **keys})


def _llama31(layers: int, hidden: int, heads: int, ffn: int, factor: float = 8.0, **keys: Any) -> dict[str, Any]:
    scaling = {
        "rope_scaling_type": "llama3",
        "rope_scaling_factor": factor,
        "original_max_position_embeddings": 8192,
        "max_position_embeddings": 131072,
    }
    return _llama3(layers, hidden, heads, ffn, **scaling, **keys)


INSTRUCTIONS_TINY: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 344,
        "max_position_embeddings": 512,
        "untie_embeddings_and_output_weights": False,
    },
    "data": {"dataset_type": "instructions", "seq_length": 128},
    "train": {
        "micro_batch_size": 16,
        "global_batch_size": 16,
        "train_iters": 2400,
        "eval_interval": 200,
        "eval_iters": 4,
        "sample_prompt": "",
    },
    "optimizer": {"lr": 4e-3, "min_lr": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.98},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 50},
    "checkpoint": {"save_interval": 800},
}
"""Learns to follow synthetic instructions in about three minutes on a CPU."""

DIGIT_SUMS: dict[str, Any] = {
    "model": {**INSTRUCTIONS_TINY["model"], "max_position_embeddings": 32},
    "data": {"seq_length": 16},
    "train": {"micro_batch_size": 64, "global_batch_size": 64, "sample_prompt": "3+5+2="},
    "optimizer": INSTRUCTIONS_TINY["optimizer"],
    "lr_schedule": INSTRUCTIONS_TINY["lr_schedule"],
}
"""Small enough to learn sums of digits from examples and then by rewards in minutes (examples/digit_sums.py)."""

PRESETS: dict[str, dict[str, Any]] = {
    "digit-sums": DIGIT_SUMS,
    "instructions-tiny": INSTRUCTIONS_TINY,
    "llama1-7b": _llama1(32, 4096, 32, 11008),
    "llama1-13b": _llama1(40, 5120, 40, 13824),
    "llama1-33b": _llama1(60, 6656, 52, 17920),
    "llama1-65b": _llama1(80, 8192, 64, 22016, 1e-5),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3.1-8b": _llama31(32, 4096, 32, 14336),
    "llama3.1-70b": _llama31(80, 8192, 64, 28672),
    "llama3.1-405b": _llama31(126, 16384, 128, 53248),
    "llama3.2-1b": _llama31(16, 2048, 32, 8192, 32.0, untie_embeddings_and_output_weights=False),
    "llama3.2-3b": _llama31(28, 3072, 24, 8192, 32.0, untie_embeddings_and_output_weights=False),
}


MEGATRON = rotary_map("llama")
