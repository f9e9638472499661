"""Options of the model section when `model.family` is `conv`. The text under a field is its help."""

from __future__ import annotations

import math
from typing import Literal

from mt_core import ConfigError
from mt_core.config import Config, ModelConfig, PositiveInt


class ConvConfig(ModelConfig):
    """A stack of gated causal convolutions and feed-forwards."""

    num_layers: PositiveInt
    """Layers, each a convolution and a feed-forward."""
    hidden_size: PositiveInt
    """Width of the residual stream, and channels of the convolutions."""
    kernel_size: PositiveInt = 8
    """Positions that a convolution sees: its own and those before it."""
    activation: Literal["gelu", "squared_relu"] = "gelu"
    """Of the feed-forward."""
    norm_epsilon: float = 1e-5
    """Added to the mean square."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""

    # What the dense feed-forward of mt-core reads beside the fields above.
    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def add_bias_linear(self) -> bool:
        return False

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(2.0 * self.num_layers)


def check_conv(config: Config) -> None:
    """Raise ConfigError for kernels that reach past the start of every sample."""
    model = config.model
    assert isinstance(model, ConvConfig)
    if model.kernel_size > config.data.seq_length:
        raise ConfigError(
            f"model.kernel_size={model.kernel_size} is longer than data.seq_length={config.data.seq_length}; "
            f"it can be 1 to {config.data.seq_length}"
        )
