"""What the configurations of models with Mamba-2 layers share, with the rules that tie the keys together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import NonNegativeFloat, PositiveInt
from mt_core.config.schema import Config, ModelConfig
from mt_core.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]


class MambaLayerConfig(ModelConfig):
    """A residual stream with Mamba-2 mixers (Dao and Gu, 2024)."""

    hidden_size: PositiveInt
    """Width of the residual stream."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Added to the mean square."""
    untie_embeddings_and_output_weights: bool = True
    """The output projection has a matrix of its own."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial weights."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(num_layers): each layer adds once."""
    fp32_residual_connection: bool = False
    """The residual stream is fp32 whatever precision.dtype is."""

    mamba_num_heads: PositiveInt | None = None
    """Heads of a mixer. Default: 2 hidden_size / mamba_head_dim."""
    mamba_head_dim: PositiveInt = 64
    """Channels of a head."""
    mamba_state_dim: PositiveInt = 128
    """Numbers that the state keeps for each channel."""
    mamba_num_groups: PositiveInt = 8
    """Groups of heads that share what writes to and reads from the state, and the statistics of the gated norm."""
    mamba_conv_kernel: PositiveInt = 4
    """Positions that the convolution sees: a position and those before it."""
    mamba_conv_bias: bool = True
    """A bias for each channel of the convolution."""
    mamba_proj_bias: bool = False
    """Biases in the input and output projections of a mixer."""
    mamba_chunk_size: PositiveInt = 128
    """Positions that training computes together. Changes speed, memory and rounding, not the result. The Triton kernels
    take 64."""
    mamba_scan_backend: Literal["auto", "torch", "triton"] = "auto"
    """What computes the recurrence: torch, mt's Triton kernels (on a GPU in bf16, at most 128 numbers of the state for
    each channel), or auto, which is torch."""
    mamba_dt_min: Positive = 1e-3
    """Smallest initial time step."""
    mamba_dt_max: Positive = 0.1
    """Largest initial time step."""
    mamba_dt_init_floor: Positive = 1e-4
    """Initial time steps below are raised to this."""
    mamba_dt_lower_limit: Annotated[float, Field(ge=0)] = 0.0
    """Time steps below are raised to this, in training and use."""
    mamba_dt_upper_limit: Positive | None = None
    """Time steps above are lowered to this. Default: no limit."""

    @property
    def mamba_heads(self) -> int:
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def mamba_inner_size(self) -> int:
        """Channels of all heads."""
        return self.mamba_heads * self.mamba_head_dim


def check_mamba_layers(config: Config) -> None:
    """Raise ConfigError for heads and groups that do not divide, or time steps that contradict one another."""
    model = config.model
    assert isinstance(model, MambaLayerConfig)
    if model.mamba_num_heads is None and 2 * model.hidden_size % model.mamba_head_dim:
        raise ConfigError(
            f"model.mamba_head_dim={model.mamba_head_dim} does not divide 2 x model.hidden_size="
            f"{2 * model.hidden_size}; it can be {listed(divisors(2 * model.hidden_size))}, or set "
            "model.mamba_num_heads"
        )
    heads_key = "the number of heads (model.mamba_num_heads)"
    must_divide("model.mamba_num_groups", model.mamba_num_groups, heads_key, model.mamba_heads)
    size = config.parallel.tensor_model_parallel_size
    groups_key = "model.mamba_num_groups (a rank has whole groups)"
    must_divide("parallel.tensor_model_parallel_size", size, groups_key, model.mamba_num_groups)
    size = config.parallel.context_parallel_size
    heads = model.mamba_heads // config.parallel.tensor_model_parallel_size
    must_divide("parallel.context_parallel_size", size, "the Mamba heads of a tensor-parallel rank", heads)
    _require_order(model, "mamba_dt_min", "mamba_dt_max")
    if model.mamba_dt_upper_limit is not None:
        _require_order(model, "mamba_dt_lower_limit", "mamba_dt_upper_limit")


def _require_order(model: MambaLayerConfig, low: str, high: str) -> None:
    if getattr(model, low) > getattr(model, high):
        raise ConfigError(f"model.{low}={getattr(model, low)} is above model.{high}={getattr(model, high)}")
