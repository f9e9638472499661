"""Configuration of ERNIE 4.5, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder


class Ernie45Config(RMSNormDecoderConfig):
    """ERNIE 4.5, dense or with experts, text (Baidu, 2025)."""

    use_bias: bool = False
    """Biases in all linear layers of a dense model."""

    @property
    def rotary_interleaved(self) -> bool:
        return True

    @property
    def add_bias_linear(self) -> bool:
        return self.use_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.use_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


def check_ernie4_5(config: Config) -> None:
    """See `ModelSpec.check`."""
    check_decoder(config)
    model = config.model
    assert isinstance(model, Ernie45Config)
    if model.use_bias and model.moe is not None:
        raise ConfigError("model.use_bias=true is not supported with model.moe; it can be false")


# -- published sizes ---------------------------------------------------------------------------------


def _ernie(layers: int, hidden: int, heads: int, groups: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": 128,
            "ffn_hidden_size": ffn,
            "vocab_size": 103424,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 131072,
            "rotary_base": 500000.0,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _experts(topk: int, width: int, dense: int, layers: int, **keys: Any) -> dict[str, Any]:
    return {
        "num_experts": 64,
        "moe_router_topk": topk,
        "moe_router_enable_expert_bias": True,
        "moe_router_weight_in_fp32": True,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})",
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],
        **keys,
    }


TIED = {"untie_embeddings_and_output_weights": False}
PRESETS: dict[str, dict[str, Any]] = {
    "ernie-4.5-0.3b": _ernie(18, 1024, 16, 2, 3072, **TIED),
    "ernie-4.5-21b-a3b": _ernie(
        28, 2560, 20, 4, 12288, moe=_experts(6, 1536, 1, 28, moe_shared_expert_intermediate_size=3072), **TIED
    ),
    "ernie-4.5-300b-a47b": _ernie(54, 8192, 64, 8, 28672, moe=_experts(8, 3584, 3, 54)),
}


MEGATRON = MegatronMap(
    unsupported="no checkpoint with rotary positions on adjacent channels (rotary_interleaved) has been compared with "
    "this family"
)
