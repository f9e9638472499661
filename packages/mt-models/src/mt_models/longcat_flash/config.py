"""Configuration of LongCat-Flash, its published size and its FLOPs."""

from __future__ import annotations

import math
from typing import Any

from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.config import DeepseekConfig, check_deepseek
from mt_models.deepseek.config import flops_per_token as latent_flops_per_token
from mt_models.flops import Convention, TokenFlops, dense_feed_forward_flops, moe_flops

SUBLAYERS = 2
"""Attentions of a layer, each with a dense feed-forward behind it."""


class LongcatFlashConfig(DeepseekConfig):
    """LongCat-Flash (Meituan, 2025). num_layers counts layers of two attentions."""

    q_lora_rank: PositiveInt = 1536
    """Channels of the latent of the queries."""

    @property
    def attention_scale(self) -> float:
        """Queries are multiplied by sqrt(hidden_size / q_lora_rank), too."""
        return super().attention_scale * math.sqrt(self.hidden_size / self.q_lora_rank)

    @property
    def latent_scale(self) -> float:
        """Latents of keys and values, behind their norm, are multiplied by this."""
        return math.sqrt(self.hidden_size / self.kv_lora_rank)

    @property
    def output_init_std(self) -> float:
        # Each sublayer adds to the residual stream as a layer of other models does.
        layers = SUBLAYERS * self.num_layers
        return self.init_method_std / math.sqrt(2.0 * layers if self.use_scaled_init_method else 1.0)


def check_longcat_flash(config: Config) -> None:
    """Raise ConfigError for a model that is none of this family."""
    check_deepseek(config)
    model = config.model
    assert isinstance(model, LongcatFlashConfig)
    if model.mtp_num_layers > 1:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} is not supported by model.family=longcat_flash; it can be 0 "
            "or 1"
        )
    if not all(MoEOptions(model).layers):
        raise ConfigError(
            f"model.moe.moe_layer_freq={MoEOptions(model)['moe_layer_freq']} has layers without experts; in a "
            "longcat_flash every layer has them (1)"
        )


MEGATRON = MegatronMap(unsupported="Megatron has no layers of two attentions, and no experts that return the token")


# -- FLOPs for each token (counted as in mt_models.flops) --------------------------------------------


def flops_per_token(config: LongcatFlashConfig, seq_length: int, *, convention: Convention = "seen") -> TokenFlops:
    """The mean over the tokens of a sequence of `seq_length`, with experts chosen evenly. Raises ConfigError when the
    vocabulary is unknown."""
    latent = latent_flops_per_token(config, seq_length, convention=convention)
    return TokenFlops(
        attention_projections=SUBLAYERS * latent.attention_projections,
        attention_core=SUBLAYERS * latent.attention_core,
        feed_forward=config.num_layers * (SUBLAYERS * dense_feed_forward_flops(config) + moe_flops(config)),
        output=latent.output,
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    flops = flops_per_token(model, config.data.seq_length)
    # One attention, a dense feed-forward, eh_proj [H, 2 H] and the logits.
    attention = (flops.attention_projections + flops.attention_core) / (SUBLAYERS * model.num_layers)
    predicted = attention + dense_feed_forward_flops(model) + 4 * model.hidden_size**2 + flops.output
    return config.data.seq_length * (flops.training + 3 * model.mtp_num_layers * predicted)


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "longcat-flash-560b": {
        "model": {
            "num_layers": 28,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "ffn_hidden_size": 12288,
            "vocab_size": 131072,
            "norm_epsilon": 1e-5,
            "latent_norm_epsilon": 1e-6,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "rotary_base": 10000000.0,
            "max_position_embeddings": 131072,
            "mtp_num_layers": 1,
            "moe": {
                "num_experts": 512,
                "moe_num_zero_experts": 256,
                "moe_router_topk": 12,
                "moe_router_pre_softmax": True,
                "moe_router_weight_in_fp32": True,
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 6.0,
                "moe_ffn_hidden_size": 2048,
                "moe_router_load_balancing_type": ["none"],
            },
        },
        "data": {"seq_length": 4096},
    },
}
