"""Configuration of Hy4, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.schema import Activation, Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek.config import check_deepseek
from mt_models.deepseek_v32.config import IndexedAttentionConfig, check_indexers, shrink_indexers


class HyV4Config(IndexedAttentionConfig):
    """Hy4 (Tencent, 2026)."""

    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    q_lora_rank: PositiveInt = 1536
    """Channels of the latent of the queries, from which the queries of the indexer come, too."""
    qk_head_dim: PositiveInt = 192
    """Channels of a query and key head without positional embedding."""
    v_head_dim: PositiveInt = 256
    """Channels of a value head, and of its gate."""
    dsa_indexer_n_heads: PositiveInt = 16
    """Query heads of the indexer; they share one key."""
    dsa_indexer_head_dim: PositiveInt = 128
    """Channels of a query and key head of the indexer, of which the last qk_pos_emb_head_dim are rotated."""
    dsa_indexer_k_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the variance in the LayerNorm of the indexer's keys."""
    dsa_indexer_topk_freq: PositiveInt = 4
    """Every so many layers one has an indexer; those behind it attend to the keys that it has chosen."""
    dsa_indexer_skip_topk_offset: NonNegativeInt = 2
    """So many first layers all have an indexer; from there on dsa_indexer_topk_freq counts."""
    swiglu_limit: PositiveFloat = 10.0
    """The largest gate of a routed expert before its activation, and the largest magnitude of what it multiplies."""
    hyper_connection_streams: PositiveInt = 4
    """Residual streams."""
    hyper_connection_magnitude: PositiveFloat = 2.0
    """The largest weight by which the output of a block is added to a stream."""
    hyper_connection_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the weights of streams."""

    _layer: int | None = PrivateAttr(default=None)
    """The layer whose feed-forward is described: see `of_layer`."""

    def of_layer(self, layer: int) -> Self:
        """The same for the feed-forward of one layer, of which routed experts alone have a limit."""
        described = self.model_copy()
        described._layer = layer
        return described

    @property
    def activation(self) -> Activation:  # type: ignore[override]
        sparse = self._layer is not None and self.moe is not None and MoEOptions(self).layers[self._layer]
        limited: Any = f"limited_swiglu:{self.swiglu_limit}"
        return limited if sparse else "swiglu"

    @property
    def shared_expert_activation(self) -> Activation:
        return "swiglu"

    @property
    def rotary_interleaved(self) -> bool:
        return False

    @property
    def dsa_indexer_rope_interleaved(self) -> bool:
        return False


def check_hy_v4(config: Config) -> None:
    """Raise ConfigError for sizes, layers and layouts that do not fit together."""
    check_deepseek(config)
    model = config.model
    assert isinstance(model, HyV4Config)
    if model.mtp_num_layers:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} is not supported by model.family=hy_v4; it can be 0"
        )
    check_indexers(config, model)


def shrink_hy_v4(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Half of the keys are left out at the end of a sequence."""
    return {**shrink_indexers(model, seq_length), "hyper_connection_streams": 3}


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "hy4-preview": {
        "model": {
            "num_layers": 34,
            "hidden_size": 2816,
            "num_attention_heads": 32,
            "ffn_hidden_size": 6912,
            "vocab_size": 120832,
            "max_position_embeddings": 262144,
            "latent_norm_epsilon": 1e-6,
            "init_method_std": 0.006,
            "moe": {
                "num_experts": 256,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.827,
                "moe_ffn_hidden_size": 768,
                "moe_shared_expert_intermediate_size": 768,
                "moe_layer_freq": "([0]*1+[1]*33)",
                "moe_router_load_balancing_type": ["none"],
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(
    unsupported="Megatron has no sinks and gates in latent attention, and no residual streams that are not mixed"
)
