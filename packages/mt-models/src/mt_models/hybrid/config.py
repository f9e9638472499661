"""Configuration of the hybrid family, with the rules that tie its keys together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.schema import Activation, Config, PositiveInt, Probability, used_when
from mt_core.errors import ConfigError
from mt_models.blocks.checks import check_tensor_parallel
from mt_models.blocks.mamba_config import MambaLayerConfig, check_mamba_layers
from mt_models.hybrid.pattern import EXPERTS, STAGE, check_pattern, layers_of, stages_of

Factor = Annotated[float, Field(gt=0)]


class HybridConfig(MambaLayerConfig):
    """Mamba-2, attention and feed-forward layers in any order (Waleffe et al., An Empirical Study of Mamba-based
    Language Models, 2024; Nemotron-H, 2025)."""

    hybrid_layer_pattern: str
    """A symbol for each layer: M Mamba-2, * attention, - feed-forward, E mixture of experts. A | begins a pipeline
    stage."""
    num_attention_heads: PositiveInt
    """Query heads of the attention layers."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads; each serves num_attention_heads / num_query_groups query heads.
    Default: num_attention_heads."""
    kv_channels: PositiveInt | None = None
    """Size of an attention head. Default: hidden_size / num_attention_heads."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""
    position_embedding_type: Literal["none", "rope"] = "none"
    """How attention gets positions: not at all, since the Mamba layers carry the order, or by rotating queries and
    keys."""
    rotary_base: Annotated[float, Field(gt=0)] = used_when(10000.0, position_embedding_type="rope")
    """Base of the rotary wavelengths."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = used_when(1.0, position_embedding_type="rope")
    """Fraction of a head's channels that is rotated."""
    max_position_embeddings: PositiveInt | None = None
    """The longest sequence that the model was trained for, as converted checkpoints state it; there is no table, and
    longer sequences are not refused."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of a feed-forward. Default: 4 hidden_size."""
    activation: Activation = "squared_relu"
    """Of the feed-forward."""
    add_bias_linear: bool = False
    """Biases in the matrices of attention and feed-forward."""
    embedding_multiplier: Factor = 1.0
    """Factor of token embeddings, in Granite 4.0 as the next three."""
    attention_multiplier: Factor | None = None
    """Factor of the products of queries and keys. Default: 1 / sqrt(head size)."""
    residual_multiplier: Factor = 1.0
    """Factor of what a layer adds to the residual stream."""
    logits_scaling: Factor = 1.0
    """Logits are divided by this."""
    moe: dict[str, Any] | None = None
    """Options of the MoE layers of experts, the E layers; needs the feed-forward "moe"."""

    @property
    def layers(self) -> str:
        """A symbol for each layer."""
        return layers_of(self.hybrid_layer_pattern)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def pipeline_layout(self) -> str | None:
        """The stages of the pattern as parallel.pipeline_model_parallel_layout has them, such as `Ett|ttt|tL`; None:
        the pattern does not say."""
        if STAGE not in self.hybrid_layer_pattern:
            return None
        # "M-*-|M-M-" -> "Etttt|ttttL": the embedding in front of the first stage, the loss behind the last
        return f"E{STAGE.join('t' * size for size in stages_of(self.hybrid_layer_pattern))}L"

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def output_init_std(self) -> float:
        # num_layers without the factor 2 of transformers: a layer here is one block and adds once.
        return self.init_method_std / math.sqrt(self.num_layers if self.use_scaled_init_method else 1.0)

    # Fixed values for keys of the shared blocks that the family does not expose.

    @property
    def normalization(self) -> Literal["RMSNorm"]:
        return "RMSNorm"

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False

    @property
    def hidden_dropout(self) -> float:
        return 0.0


NEUTRAL_FACTORS: Mapping[str, float | None] = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Granite's factors where they change nothing, which other formats than its own need."""


def check_hybrid(config: Config) -> None:
    """Raise ConfigError for a pattern that cannot be read or split into stages, and heads that do not divide."""
    model = config.model
    assert isinstance(model, HybridConfig)
    check_pattern(model.hybrid_layer_pattern)
    check_mamba_layers(config)
    _check_attention(model)
    check_tensor_parallel(
        config, query_groups=model.query_groups, ffn_size=model.ffn_size, heads=model.num_attention_heads
    )
    _check_experts(model)
    _check_stages(config)


def _check_stages(config: Config) -> None:
    model, parallel = config.model, config.parallel
    assert isinstance(model, HybridConfig)
    if model.pipeline_layout is None:
        return
    if parallel.pipeline_model_parallel_layout is not None:
        raise ConfigError(
            f"model.hybrid_layer_pattern={model.hybrid_layer_pattern!r} and parallel.pipeline_model_parallel_layout="
            f"{parallel.pipeline_model_parallel_layout!r} both divide the layers into stages; remove the second, or "
            f"the {STAGE} of the first"
        )
    stages = "the number of stages in model.hybrid_layer_pattern"
    size = parallel.pipeline_model_parallel_size
    must_divide("parallel.pipeline_model_parallel_size", size, stages, len(stages_of(model.hybrid_layer_pattern)))


def _check_attention(model: HybridConfig) -> None:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}; the number of heads can be "
            f"{listed(divisors(model.hidden_size))}, or set model.kv_channels"
        )
    must_divide("model.num_query_groups", model.query_groups, "model.num_attention_heads", model.num_attention_heads)
    if model.position_embedding_type == "rope" and (model.rotary_dim % 2 or model.rotary_dim == 0):
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} rotates {model.rotary_dim} of the {model.head_dim} channels "
            "of a head; positions turn pairs of channels, so it has to be an even number above 0"
        )


def _check_experts(model: HybridConfig) -> None:
    if (EXPERTS in model.layers) == (model.moe is not None):
        return
    pattern = f"model.hybrid_layer_pattern={model.hybrid_layer_pattern!r}"
    if model.moe is None:
        raise ConfigError(f"{pattern} has layers of experts (E); set model.moe, their options")
    raise ConfigError(f"model.moe is set, but {pattern} has no layer of experts; put E where they go")
