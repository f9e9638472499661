"""Configuration that encoders have in common."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from mt_core.config.schema import PositiveInt, Section


class EncoderConfig(Section):
    """Layers as BERT and vision transformers have them: heads that divide the width among them, LayerNorm, biases in
    all linear layers, no norms of heads, no rotary positions."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Attention heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 4 hidden_size."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance."""
    init_method_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""

    # Fixed values for keys that the shared blocks read.

    @property
    def normalization(self) -> Literal["LayerNorm"]:
        return "LayerNorm"

    @property
    def query_groups(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def add_bias_linear(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return True

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False

    @property
    def output_init_std(self) -> float:
        # Two matrices of each layer add to the residual stream, whose variance would otherwise grow with depth (GPT-2).
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)
