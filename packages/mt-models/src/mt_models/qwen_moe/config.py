"""Configuration of the Qwen-MoE family, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import PartialRotaryConfig, check_moe_decoder
from mt_models.blocks.megatron_decoder import rotary_map
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction


class QwenMoeConfig(PredictionKeys, PartialRotaryConfig):
    """Qwen1.5-MoE (2024), Qwen2-57B-A14B (2024), Qwen3-MoE (2025) and GLM-4.5 to 4.7 (2025)."""

    add_qkv_bias: bool = False
    """Biases on queries, keys and values: Qwen2."""
    qk_layernorm: bool = True
    """Normalize each query and key head before positions are applied: Qwen3."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""


def check_qwen_moe(config: Config) -> None:
    check_moe_decoder(config)
    model = config.model
    assert isinstance(model, QwenMoeConfig)
    check_prediction(config, model)
    if model.mtp_num_layers and not MoEOptions(model).layers[-1]:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} with a last layer without experts is not supported: "
            "layers of multi-token prediction are of its kind, and those of GLM-4.5 have experts"
        )


# -- published sizes (base models) -------------------------------------------------------------------


def _qwen_moe(layers: int, hidden: int, heads: int, groups: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "vocab_size": 151936,
            "rotary_base": 1000000.0,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _qwen2(
    layers: int, hidden: int, heads: int, groups: int, *, experts: int, topk: int, expert_ffn: int, shared: int,
    positions: int,
) -> dict[str, Any]:  # fmt: skip
    moe = {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": expert_ffn,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],
    }
    variant = {"add_qkv_bias": True, "qk_layernorm": False, "max_position_embeddings": positions}
    return _qwen_moe(layers, hidden, heads, groups, shared, moe=moe, **variant)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    moe = {
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": expert_ffn,
        "moe_router_load_balancing_type": ["global_aux_loss"],
        "moe_aux_loss_coeff": [0.001],
    }
    variant = {"kv_channels": 128, "max_position_embeddings": 32768}
    return _qwen_moe(layers, hidden, heads, 4, ffn, moe=moe, **variant)


def _glm(
    layers: int, hidden: int, ffn: int, dense: int, experts: int, expert_ffn: int, scale: float, positions: int,
    **keys: Any,
) -> dict[str, Any]:  # fmt: skip
    """GLM-4.5 to 4.7 (Z.ai, 2025): 96 heads of 128, of which half is rotated."""
    moe = {
        "num_experts": experts,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
        "moe_ffn_hidden_size": expert_ffn,
        "moe_shared_expert_intermediate_size": expert_ffn,
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})",
    }
    variant = {"vocab_size": 151552, "norm_epsilon": 1e-5, "kv_channels": 128, "rotary_percent": 0.5}
    variant |= {"add_qkv_bias": True, "max_position_embeddings": positions, "mtp_num_layers": 1, **keys}
    return _qwen_moe(layers, hidden, 96, 8, ffn, moe=moe, **variant)


GLM_4_5 = (92, 5120, 12288, 3, 160, 1536, 2.5)
"""Layers, widths and experts of GLM-4.5, which 4.6 and 4.7 have too."""
PRESETS: dict[str, dict[str, Any]] = {
    "qwen1.5-moe-a2.7b": _qwen2(24, 2048, 16, 16, experts=60, topk=4, expert_ffn=1408, shared=5632, positions=8192),
    "qwen2-57b-a14b": _qwen2(28, 3584, 28, 4, experts=64, topk=8, expert_ffn=2560, shared=20480, positions=131072),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, 1536),
    "glm-4.5-air": _glm(46, 4096, 10944, 1, 128, 1408, 1.0, 131072, qk_layernorm=False),
    "glm-4.5": _glm(*GLM_4_5, 131072),
    "glm-4.6": _glm(*GLM_4_5, 202752),
    "glm-4.7": _glm(*GLM_4_5, 202752),
}


MEGATRON = rotary_map("qwen_moe")
