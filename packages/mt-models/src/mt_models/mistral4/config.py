"""Configuration of Mistral 4, and published sizes of Mistral Small 4 and Mistral Large 3."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import QueryScaling
from mt_models.deepseek.config import DeepseekConfig, check_deepseek


class Mistral4Config(DeepseekConfig):
    """Mistral Small 4 (Mistral AI, 2026) and Mistral Large 3 (2025), text."""

    query_scaling_beta: Annotated[float, Field(ge=0)] = 0.1
    """Queries at position p are multiplied by 1 + beta ln(1 + floor(p / original_max_position_embeddings))."""

    @property
    def query_scaling(self) -> QueryScaling | None:
        original = self.original_max_position_embeddings or self.max_position_embeddings
        return QueryScaling(self.query_scaling_beta, original) if self.query_scaling_beta else None


def check_mistral4(config: Config) -> None:
    check_deepseek(config)
    model = config.model
    assert isinstance(model, Mistral4Config)
    if model.mtp_num_layers:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} is not supported by model.family=mistral4; it can be 0"
        )


MEGATRON = MegatronMap(unsupported="Megatron has no queries that grow with their positions")


# -- published sizes ------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "mistral-small-4-119b": {
        "model": {
            "num_layers": 36,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "ffn_hidden_size": 12288,
            "vocab_size": 131072,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_head_dim": 64,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 1048576,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 128.0,
            "original_max_position_embeddings": 8192,
            "rope_mscale": 1.0,
            "rope_mscale_all_dim": 1.0,
            "moe": {
                "num_experts": 128,
                "moe_router_topk": 4,
                "moe_ffn_hidden_size": 2048,
                "moe_shared_expert_intermediate_size": 2048,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
            },
        },
        "data": {"seq_length": 4096},
    },
    # Published in Mistral's own layout: YaRN leaves the scores as they are (apply_scale is false there).
    "mistral-large-3-675b": {
        "model": {
            "num_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "ffn_hidden_size": 16384,
            "vocab_size": 131072,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 294912,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 36.0,
            "original_max_position_embeddings": 8192,
            "rope_attention_factor": 1.0,
            "moe": {
                "num_experts": 128,
                "moe_router_topk": 4,
                "moe_ffn_hidden_size": 4096,
                "moe_shared_expert_intermediate_size": 4096,
                "moe_layer_freq": "([0]*3+[1]*58)",
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
            },
        },
        "data": {"seq_length": 4096},
    },
}
