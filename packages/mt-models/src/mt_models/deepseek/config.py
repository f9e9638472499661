"""Configuration of the DeepSeek family."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from mt_core.config.schema import Config, NonNegativeInt, PositiveInt
from mt_core.errors import ConfigError
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder
from mt_models.blocks.moe import MoEOptions, frequency_of


class DeepseekConfig(DecoderConfig):
    """DeepSeek-V2 (2024) and DeepSeek-V3 (2024)."""

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
    moe: dict[str, Any] | None = None
    """Options of the MoE layers. Default: every layer is dense."""
    mtp_num_layers: NonNegativeInt = 0
    """Further layers, of which the d-th predicts the token d + 1 positions ahead, in training."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0)] = 0.1
    """What the mean of their losses counts beside that of the next token."""

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

    def with_predicted_layers(self) -> DeepseekConfig:
        """The same with the layers of multi-token prediction counted behind the others, of the last one's kind."""
        changed: dict[str, Any] = {"num_layers": self.num_layers + self.mtp_num_layers}
        if self.moe is not None:
            layers = MoEOptions(self).layers
            # DeepSeek-V3's prediction layer is MoE, as its last layer is.
            pattern = layers + [layers[-1]] * self.mtp_num_layers
            changed["moe"] = {**self.moe, "moe_layer_freq": frequency_of(pattern)}
        return _CountsPredictedLayers.model_construct(self.model_fields_set, **{**dict(self), **changed})


class _CountsPredictedLayers(DeepseekConfig):
    """Its num_layers includes the layers of multi-token prediction."""

    @property
    def output_init_std(self) -> float:
        # Megatron takes the number of the decoder's layers for both.
        layers = self.num_layers - self.mtp_num_layers
        return self.init_method_std / math.sqrt(2.0 * layers if self.use_scaled_init_method else 1.0)


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
    _check_prediction(config, model)


def _check_prediction(config: Config, model: DeepseekConfig) -> None:
    if model.mtp_num_layers == 0:
        if "mtp_loss_scaling_factor" in model.model_fields_set and model.mtp_loss_scaling_factor != 0.1:
            raise ConfigError("model.mtp_loss_scaling_factor would be ignored: set model.mtp_num_layers too")
        return
    if config.parallel.context_parallel_size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={config.parallel.context_parallel_size} cannot be combined with "
            f"model.mtp_num_layers={model.mtp_num_layers}: a position needs the tokens after it, which other ranks "
            "hold; one of the two has to go (1, or 0)"
        )
    if model.mtp_num_layers >= config.data.seq_length:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} has to be below data.seq_length={config.data.seq_length}"
        )
