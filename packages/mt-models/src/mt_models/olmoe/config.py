"""Configuration of the OLMoE family, and its published sizes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.checks import must_divide
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig, check_moe_decoder


class OlmoeConfig(RMSNormDecoderConfig):
    """OLMoE-1B-7B (Muennighoff et al., 2024)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    clip_qkv: Annotated[float, Field(gt=0)] | None = None
    """Queries, keys (both behind their norms) and values are clamped to this magnitude. Default: they are not."""

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        """Not of each head: the family has norms over all of them."""
        return False


def check_olmoe(config: Config) -> None:
    check_moe_decoder(config)
    model = config.model
    assert isinstance(model, OlmoeConfig)
    # The norm of the keys is sharded as the keys are: whole heads for each rank.
    size = config.parallel.tensor_model_parallel_size
    must_divide("parallel.tensor_model_parallel_size", size, "model.num_query_groups", model.query_groups)


# -- published sizes ---------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b": {
        "model": {
            "num_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_query_groups": 16,
            "ffn_hidden_size": 1024,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "vocab_size": 50304,
            "moe": {
                "num_experts": 64,
                "moe_router_topk": 8,
                "moe_router_pre_softmax": True,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.01],
                "moe_z_loss_coeff": 0.001,
            },
        },
        "data": {"seq_length": 4096},
    },
}


MEGATRON = MegatronMap(
    unsupported="Megatron normalizes queries and keys head by head, this family over all heads together"
)
