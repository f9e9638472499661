"""Configuration of GLM-5.3-Flash, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.deepseek_v32.config import check_indexer_layout
from mt_models.kimi_linear.config import KimiLinearConfig, check_kimi_linear, shrink_kimi_linear


class Glm5NextConfig(KimiLinearConfig):
    """GLM-5.3-Flash (Z.ai, 2026), text."""

    predicts: ClassVar[bool] = True
    q_lora_rank: PositiveInt = 1536
    """Channels of the latent of the queries, from which the queries of the indexer come, too."""
    qk_pos_emb_head_dim: NonNegativeInt = 0
    """No channel has positions."""
    linear_decay_lower_bound: Annotated[float, Field(lt=0)] | None = None
    """The least logarithm of a decay, which is this times a sigmoid. Default: decays are not bounded, and their
    logarithm is a scaled softplus."""
    swiglu_limit: Annotated[float, Field(gt=0)] = 10.0
    """The largest gate of a feed-forward before its activation, and the largest magnitude of what it multiplies."""
    dsa_indexer_n_heads: PositiveInt = 32
    """Query heads of an indexer; they share one key."""
    dsa_indexer_head_dim: PositiveInt = 128
    """Channels of a query and key head of an indexer."""
    dsa_indexer_topk: PositiveInt = 2048
    """Positions of the pools that a query attends to: those with the highest scores of the indexer."""
    dsa_indexer_pool_size: PositiveInt = 4
    """Positions that the indexer sees as one key."""
    dsa_indexer_k_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the variance in the LayerNorm of the indexer's keys."""
    hyper_connection_streams: PositiveInt = 4
    """Residual streams."""
    hyper_connection_iterations: PositiveInt = 20
    """Iterations that make the sums of rows and columns of the matrices that mix streams 1."""
    hyper_connection_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the weights of streams, and to the sums of rows and columns."""

    @property
    def activation(self) -> Any:
        return f"limited_swiglu:{self.swiglu_limit}"

    @property
    def rotary_dim(self) -> int:
        # Nothing is rotated. The angles, which every decoder makes, are those of one pair of channels.
        return 2


def check_glm5_next(config: Config) -> None:
    check_kimi_linear(config)
    model = config.model
    assert isinstance(model, Glm5NextConfig)
    if model.qk_pos_emb_head_dim:
        raise ConfigError(
            f"model.qk_pos_emb_head_dim={model.qk_pos_emb_head_dim} is not supported by model.family=glm5_next, whose "
            "attention has no positions; it can be 0"
        )
    if model.dsa_indexer_topk % model.dsa_indexer_pool_size:
        raise ConfigError(
            f"model.dsa_indexer_pool_size={model.dsa_indexer_pool_size} does not divide model.dsa_indexer_topk="
            f"{model.dsa_indexer_topk}, which are whole pools"
        )
    if model.dsa_indexer_head_dim == 1:
        raise ConfigError(
            "model.dsa_indexer_head_dim=1: the norm of a key of one channel makes all keys equal; it can be 2 or more"
        )
    check_indexer_layout(config, model)


def shrink_glm5_next(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Both kinds of layers stay, and half of the keys are left out at the end of a sequence."""
    return {
        **shrink_kimi_linear(model, seq_length),
        "qk_pos_emb_head_dim": 0,
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_pool_size": 2,
        "dsa_indexer_topk": max(seq_length // 4 * 2, 2),
        "hyper_connection_streams": 3,
        "hyper_connection_iterations": 4,
    }


# -- published size ------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "glm-5.3-flash": {
        "model": {
            "num_layers": 45,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "ffn_hidden_size": 12288,
            "vocab_size": 154880,
            "max_position_embeddings": 1048576,
            "norm_epsilon": 1e-5,
            "qk_head_dim": 256,
            "v_head_dim": 256,
            "linear_num_key_heads": 64,
            "linear_num_value_heads": 64,
            "linear_decay_lower_bound": -5.0,
            "mtp_num_layers": 1,
            "moe": {
                "num_experts": 288,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_ffn_hidden_size": 2048,
                "moe_shared_expert_intermediate_size": 2048,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                "moe_layer_freq": "([0]*3+[1]*42)",
            },
        },
        "data": {"seq_length": 4096},
    },
}
