"""Configuration of Muse Spark's decoder, and its published size."""

from __future__ import annotations

from typing import Any

from mt_core.config.fields import NonNegativeInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.moe import MoEOptions
from mt_models.muse_glimmer.config import MuseGlimmerConfig, PositiveFloat, check_muse_glimmer


class MuseSparkConfig(MuseGlimmerConfig):
    """Muse Spark (Meta, 2026), text only."""

    qk_scale_factor: float = 5.4730064863875
    """Multiplies queries behind their norm. Scores are divided by the square root of the size of a head too."""
    output_multiplier: float = 1.0
    """Multiplies logits before their soft cap, and those of the router."""
    residual_gate_temperature: PositiveFloat = 0.3
    """Divides the gates of the residual stream before their sigmoid."""
    audio_token_id: NonNegativeInt | None = None
    """The same of a sound as image_token_id of a picture."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts and moe_latent_size have to be set."""

    @property
    def tokens_of_other_media(self) -> tuple[int, ...]:
        sounds = () if self.audio_token_id is None else (self.audio_token_id,)
        return (*super().tokens_of_other_media, *sounds)

    # What the MoE layer reads.

    @property
    def router_logit_scale(self) -> float:
        return self.output_multiplier

    @property
    def moe_latent_epsilon(self) -> float:
        """Epsilon of the norm of what the experts read."""
        return self.norm_epsilon

    @property
    def moe_output_epsilon(self) -> float:
        """Epsilon of the norm of each expert's output."""
        return self.post_norm_epsilon


def check_muse_spark(config: Config) -> None:
    check_muse_glimmer(config)
    assert isinstance(config.model, MuseSparkConfig)
    moe = MoEOptions(config.model)
    if moe["moe_latent_size"] is None:
        raise ConfigError(
            "model.moe.moe_latent_size is not set; experts of model.family=muse_spark work on a latent of the tokens, "
            "so give its width"
        )
    if moe["moe_apply_probs_on_input"]:
        raise ConfigError(
            "model.moe.moe_apply_probs_on_input=true is not possible with model.family=muse_spark, which normalizes "
            "the output of each expert; leave it out"
        )


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "muse-spark-816b-a42b": {
        "model": {
            "num_layers": 62,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_query_groups": 16,
            "kv_channels": 64,
            "ffn_hidden_size": 16384,
            "vocab_size": 202048,
            "max_position_embeddings": 1048576,
            "rotary_base": 500000.0,
            "norm_epsilon": 1e-5,
            "output_multiplier": 0.1767766952966369,
            "image_token_id": 200092,
            "video_token_id": 200091,
            "audio_token_id": 200038,
            "moe": {
                "num_experts": 256,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_weight_epsilon": 1e-15,
                "moe_router_weight_in_fp32": True,
                "moe_ffn_hidden_size": 4096,
                "moe_latent_size": 4096,
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(
    unsupported="Megatron has no gates of the residual stream and no norms of experts' outputs and of token embeddings"
)
