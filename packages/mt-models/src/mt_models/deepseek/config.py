"""Configuration of the DeepSeek family, its published sizes and its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import check_decoder
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.placeholder_config import PlaceholderKeys
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction
from mt_models.flops import Convention, TokenFlops, dense_feed_forward_flops, moe_flops


class DeepseekConfig(PlaceholderKeys, PredictionKeys):
    """DeepSeek-V2 (2024) and DeepSeek-V3 (2024)."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of all norms, those of the latents included."""
    q_lora_rank: PositiveInt | None = None
    """Channels of the latent of the queries. Default: queries come from the hidden state by one matrix."""
    kv_lora_rank: PositiveInt = 512
    """Channels of the latent of keys and values."""
    qk_head_dim: PositiveInt = 128
    """Channels of a query and key head without positional embedding."""
    qk_pos_emb_head_dim: PositiveInt = 64
    """Channels of a query head, and of the one key for all heads, that positions rotate."""
    v_head_dim: PositiveInt = 128
    """Channels of a value head."""
    latent_norm_epsilon: Annotated[float, Field(ge=0)] | None = None
    """Added to the mean square in norms of latents. Default: norm_epsilon."""
    moe: dict[str, Any] | None = None
    """Options of the MoE layers. Default: every layer is dense."""

    @property
    def latent_epsilon(self) -> float:
        return self.norm_epsilon if self.latent_norm_epsilon is None else self.latent_norm_epsilon

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_pos_emb_head_dim

    @property
    def rotary_dim_key(self) -> str:
        return "model.qk_pos_emb_head_dim"

    @property
    def rotary_interleaved(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        """Not of each head: the latents are normalized."""
        return False

    @property
    def attention_scale(self) -> float:
        """Scores are multiplied by this, with YaRN that names rope_mscale_all_dim: (0.1 m ln(factor) + 1)^2."""
        # Squared: the factor belongs to queries and to keys, and the queries take both. It lengthens all channels of a
        # head, while rope_mscale / rope_mscale_all_dim (see yarn_scale) is on the rotated ones.
        if self.rope_scaling_type != "yarn" or not self.rope_mscale_all_dim:
            return 1.0
        return (0.1 * self.rope_mscale_all_dim * math.log(self.rope_scaling_factor or 1.0) + 1.0) ** 2


def check_deepseek(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, DeepseekConfig)
    for key, instead in (("kv_channels", "qk_head_dim and v_head_dim"), ("num_query_groups", "kv_lora_rank")):
        if getattr(model, key) is not None:
            raise ConfigError(f"model.{key}={getattr(model, key)} would be ignored: this family has model.{instead}")
    if model.qk_pos_emb_head_dim % 2:
        raise ConfigError(
            f"model.qk_pos_emb_head_dim={model.qk_pos_emb_head_dim} is odd; rotary positions turn pairs of channels, "
            "so it has to be even"
        )
    if model.moe is not None:
        MoEOptions(model)
    check_prediction(config, model)


# -- a small model for checks ------------------------------------------------------------------------

SIZES = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


def shrink_deepseek(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """q_lora_rank stays null if it is, since that is another code path."""
    return {key: size for key, size in SIZES.items() if model[key]}


# -- published sizes ---------------------------------------------------------------------------------

_YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 163840,
}


def _deepseek(
    layers: int, hidden: int, heads: int, ffn: int, vocab: int, dense: int, moe: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "moe": {**moe, "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})"},
            **_YARN,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _v2_experts(num: int, ffn: int, scale: float, **keys: Any) -> dict[str, Any]:
    """6 of `num` experts per token, and 2 shared ones."""
    return {
        "num_experts": num,
        "moe_router_topk": 6,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": scale,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": 2 * ffn,
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [0.001],
        **keys,
    }


_V2_GROUPS = {"moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_router_group_score_topk": 1}
_V3_EXPERTS = {
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_group_score_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_load_balancing_type": ["seq_aux_loss"],
    "moe_aux_loss_coeff": [0.0001],
}


def _kimi(factor: float, positions: int) -> dict[str, Any]:
    """Kimi K2 (Moonshot AI, 2025): DeepSeek-V3 with more experts and fewer heads, without groups and MTP."""
    experts = {key: value for key, value in _V3_EXPERTS.items() if "group" not in key}
    return _deepseek(
        61,
        7168,
        64,
        18432,
        163840,
        1,
        {**experts, "num_experts": 384, "moe_router_topk_scaling_factor": 2.827},
        q_lora_rank=1536,
        rotary_base=50000.0,
        rope_scaling_factor=factor,
        rope_beta_fast=1.0,
        rope_mscale=1.0,
        rope_mscale_all_dim=1.0,
        max_position_embeddings=positions,
    )


PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _deepseek(
        27, 2048, 16, 10944, 102400, 1, _v2_experts(64, 1408, 1.0), rope_mscale=0.707, rope_mscale_all_dim=0.707
    ),
    "deepseek-v2": _deepseek(
        60,
        5120,
        128,
        12288,
        102400,
        1,
        _v2_experts(160, 1536, 16.0, **_V2_GROUPS),
        q_lora_rank=1536,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
    ),
    "deepseek-v3": _deepseek(
        61,
        7168,
        128,
        18432,
        129280,
        3,
        _V3_EXPERTS,
        q_lora_rank=1536,
        mtp_num_layers=1,
        rope_mscale=1.0,
        rope_mscale_all_dim=1.0,
    ),
    "kimi-k2": _kimi(factor=32.0, positions=131072),
    "kimi-k2-thinking": _kimi(factor=64.0, positions=262144),
}


# -- FLOPs for each token (counted as in mt_models.flops) --------------------------------------------


@dataclass(frozen=True)
class DeepseekFlops(TokenFlops):
    """Forward FLOPs for each token, over all layers."""

    prediction: float = 0.0
    """Layers of multi-token prediction and their logits, in training."""

    @property
    def forward(self) -> float:
        """FLOPs of the model without multi-token prediction."""
        return super().forward - self.prediction

    @property
    def training(self) -> float:
        """Forward and backward, MTP included."""
        return 3 * (self.forward + self.prediction)


def flops_per_token(config: DeepseekConfig, seq_length: int, *, convention: Convention = "seen") -> DeepseekFlops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size is not set, and the output layer's FLOPs depend on it")
    layers, projections = config.num_layers, projection_flops(config)
    keys = seq_length if convention == "full" else (seq_length + 1) / 2
    core = 2 * keys * config.num_attention_heads * (config.head_dim + config.v_head_dim)
    output = 2 * config.hidden_size * config.vocab_size
    counted = config.with_predicted_layers()
    feed_forward, with_predicted = layers * _feed_forward(config), counted.num_layers * _feed_forward(counted)
    # 4 H^2: eh_proj, [H, 2 H]. Each depth computes logits of its own with the model's LM head.
    each_depth = projections + core + 4 * config.hidden_size**2 + output
    return DeepseekFlops(
        attention_projections=layers * projections,
        attention_core=layers * core,
        feed_forward=feed_forward,
        output=output,
        prediction=config.mtp_num_layers * each_depth + with_predicted - feed_forward,
    )


def projection_flops(config: DeepseekConfig) -> float:
    """One layer's attention: the down and up projections, and the output projection."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rank, query = config.q_lora_rank, heads * config.head_dim
    queries = hidden * query if rank is None else hidden * rank + rank * query
    # The expanded form, which training uses; decoding's absorbed form has other products.
    keys_values = hidden * (latent + config.qk_pos_emb_head_dim)
    keys_values += latent * heads * (config.qk_head_dim + config.v_head_dim)
    return 2.0 * (queries + keys_values + heads * config.v_head_dim * hidden)


def _feed_forward(config: DeepseekConfig) -> float:
    return dense_feed_forward_flops(config) if config.moe is None else moe_flops(config)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
