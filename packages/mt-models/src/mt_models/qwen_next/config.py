"""Configuration of Qwen3-Next, Qwen3.5 and 3.6, and their FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.blocks.delta_net_config import (
    DeltaNetKeys,
    check_delta_nets,
    linear_layers,
)
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction
from mt_models.delta_net_flops import DeltaNetFlops, delta_net_flops
from mt_models.flops import (
    Convention,
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    moe_flops,
    projection_flops,
)


class QwenNextConfig(PredictionKeys, DeltaNetKeys, RMSNormDecoderConfig):
    """Qwen3-Next (2025), Qwen3.5 and Qwen3.6 (2026), without pictures."""

    generation: Literal["qwen3_next", "qwen3_5"] = "qwen3_5"
    """Whose names Hugging Face files have: the projections of a gated delta net in two matrices and experts one by one
    (qwen3_next), or in four and experts packed (qwen3_5). It changes nothing that is computed."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of each attention head that positions rotate."""
    mrope_section: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] | None = None
    """Pairs of rotated channels of a head that turn by a picture's position in time, height and width (qwen3_5). The
    three are equal in text: they change nothing here, and are kept for programs that take pictures. Default: that of
    these programs."""
    mtp_num_layers: Literal[0, 1] = 0
    """1: a further layer of attention predicts the token after the next one, in training."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_percent)

    @property
    def rotary_dim_key(self) -> str:
        return f"model.rotary_percent={self.rotary_percent} of {self.head_dim} channels"

    @property
    def linear_layers(self) -> list[bool]:
        """For each layer whether it is a gated delta net."""
        return linear_layers(self)

    # Fixed values for keys of the shared blocks.

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True

    @property
    def linear_allow_neg_eigval(self) -> bool:
        return False

    @property
    def linear_norm_epsilon(self) -> float:
        return self.norm_epsilon


def check_qwen_next(config: Config) -> None:
    """Raise ConfigError for heads, layers and layouts that do not fit together."""
    check_decoder(config)
    check_delta_nets(config)
    model = config.model
    assert isinstance(model, QwenNextConfig)
    if model.rotary_dim == 0:
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} of {model.head_dim} channels leaves none to rotate; "
            f"at least {2 / model.head_dim:.3g} is needed"
        )
    if model.moe is not None:
        MoEOptions(model)
    check_prediction(config, model)


SMALL = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_attention_freq": 2,
    "linear_chunk_size": 8,
    "rotary_percent": 0.5,
}


def shrink_qwen_next(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`."""
    return dict(SMALL)


MEGATRON = MegatronMap(
    unsupported="Megatron's arguments of gated delta nets (experimental_attention_variant) are not written; names and "
    "layouts of the parameters are Megatron-Core's"
)


# -- FLOPs for each token --------------------------------------------------------------------------------


@dataclass(frozen=True)
class QwenNextFlops(DeltaNetFlops):
    """Forward FLOPs for each token, over all layers."""

    prediction: float
    """The layer of multi-token prediction, its projection and its logits."""


def flops_per_token(config: QwenNextConfig, seq_length: int, *, convention: Convention = "seen") -> QwenNextFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    projections = projection_flops(config) + gate_flops(config)
    feed_forward = moe_flops(config) if config.moe is not None else dense_feed_forward_flops(config)
    decoder = delta_net_flops(config, seq_length, convention, projections=projections, feed_forward=feed_forward)
    core = core_flops(config, mean_keys(seq_length, None, convention))
    eh_proj = 4 * config.hidden_size**2
    predicted = eh_proj + projections + core + feed_forward + decoder.output
    return QwenNextFlops(**vars(decoder), prediction=config.mtp_num_layers * predicted)


def gate_flops(config: QwenNextConfig) -> float:
    """FLOPs of one layer's projection of output gates."""
    return 2 * config.hidden_size * config.num_attention_heads * config.head_dim


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
