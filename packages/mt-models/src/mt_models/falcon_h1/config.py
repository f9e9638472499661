"""Configuration of Falcon-H1, its published sizes and its FLOPs."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import PositiveInt, Probability
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import check_tensor_parallel
from mt_models.blocks.mamba_config import MambaLayerConfig, check_mamba_layers
from mt_models.flops import Convention, core_flops, dense_feed_forward_flops, mean_keys
from mt_models.flops import projection_flops as attention_projection_flops
from mt_models.hybrid.config import HybridFlops
from mt_models.mamba.config import convolution_flops, output_flops, projection_flops, scan_flops

Factor = Annotated[float, Field(gt=0)]


class FalconH1Config(MambaLayerConfig):
    """Falcon-H1 (TII, 2025): x + mamba(norm(x)) + attention(norm(x)), then x + feed_forward(norm(x))."""

    num_layers: PositiveInt
    """Layers, each with a Mamba-2 mixer, attention and a feed-forward."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads; each serves num_attention_heads / num_query_groups query heads.
    Default: num_attention_heads."""
    kv_channels: PositiveInt | None = None
    """Size of an attention head. Default: hidden_size / num_attention_heads."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""
    rotary_base: Factor = 1e11
    """Base of the rotary wavelengths."""
    max_position_embeddings: PositiveInt | None = None
    """The longest sequence that the model was trained for, as converted checkpoints state it; longer ones are not
    refused."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 4 hidden_size."""
    mamba_gated_norm: bool = False
    """The gated output of a mixer is normalized, in mamba_num_groups parts."""
    embedding_multiplier: Factor = 1.0
    """Factor of token embeddings."""
    lm_head_multiplier: Factor = 1.0
    """Factor of logits."""
    attention_in_multiplier: Factor = 1.0
    """Factor of what attention reads."""
    attention_out_multiplier: Factor = 1.0
    """Factor of what attention adds."""
    key_multiplier: Factor = 1.0
    """Factor of keys."""
    ssm_in_multiplier: Factor = 1.0
    """Factor of what the Mamba mixer reads."""
    ssm_out_multiplier: Factor = 1.0
    """Factor of what the Mamba mixer adds."""
    ssm_multipliers: list[Factor] = Field(default=[1.0] * 5, min_length=5, max_length=5)
    """Factors of the parts z, x, B, C and dt of the mixer's input projection."""
    mlp_multipliers: list[Factor] = Field(default=[1.0] * 2, min_length=2, max_length=2)
    """Factors of the gate of the feed-forward, and of what it adds."""

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)

    # Fixed values for keys of the shared blocks that the family does not expose.

    @property
    def normalization(self) -> Literal["LayerNorm", "RMSNorm"]:
        return "RMSNorm"

    @property
    def activation(self) -> Literal["swiglu"]:
        return "swiglu"

    @property
    def add_bias_linear(self) -> bool:
        return False

    @property
    def hidden_dropout(self) -> float:
        return 0.0

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False


def check_falcon_h1(config: Config) -> None:
    """Raise ConfigError for heads, groups and ranks that do not divide."""
    model = config.model
    assert isinstance(model, FalconH1Config)
    check_mamba_layers(config)
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}; the number of heads can be "
            f"{listed(divisors(model.hidden_size))}, or set model.kv_channels"
        )
    if model.head_dim % 2:
        raise ConfigError(
            f"model.kv_channels={model.head_dim} is odd; rotary positions turn pairs of channels, so it has to be even"
        )
    must_divide("model.num_query_groups", model.query_groups, "model.num_attention_heads", model.num_attention_heads)
    check_tensor_parallel(
        config, query_groups=model.query_groups, ffn_size=model.ffn_size, heads=model.num_attention_heads
    )


MEGATRON = MegatronMap(unsupported="Megatron has no layers with Mamba and attention side by side")


# -- published sizes ---------------------------------------------------------------------------------
#
# Shapes, for training from the beginning. The factors of published weights are in their config.json.


def _falcon(
    layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocab: int, mamba: tuple[int, int], **keys: Any
) -> dict[str, Any]:
    """heads: of queries, and of keys and values. mamba: heads of a mixer, and their size."""
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "vocab_size": vocab,
            "num_attention_heads": heads[0],
            "num_query_groups": heads[1],
            "kv_channels": 128,
            "ffn_hidden_size": ffn,
            "mamba_num_heads": mamba[0],
            "mamba_head_dim": mamba[1],
            "mamba_state_dim": 256,
            "mamba_num_groups": 1,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "falcon-h1-0.5b": _falcon(36, 1024, (8, 2), 2048, 32784, (24, 64), kv_channels=64, mamba_state_dim=128),
    "falcon-h1-1.5b": _falcon(24, 2048, (8, 2), 4608, 65537, (48, 64)),
    "falcon-h1-1.5b-deep": _falcon(66, 1280, (6, 2), 3072, 65537, (24, 64)),
    "falcon-h1-3b": _falcon(32, 2560, (10, 2), 6144, 65537, (32, 128)),
    "falcon-h1-7b": _falcon(44, 3072, (12, 2), 12288, 130049, (24, 128)),
    "falcon-h1-34b": _falcon(72, 5120, (20, 4), 21504, 261120, (32, 128), mamba_num_groups=2),
}


# -- FLOPs for each token ----------------------------------------------------------------------------


def flops_per_token(config: FalconH1Config, seq_length: int, *, convention: Convention = "seen") -> HybridFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    layers = config.num_layers
    return HybridFlops(
        mamba_projections=layers * projection_flops(config),
        mamba_convolution=layers * convolution_flops(config),
        mamba_scan=layers * scan_flops(config, seq_length, convention),
        attention_projections=layers * attention_projection_flops(config),
        attention_core=layers * core_flops(config, mean_keys(seq_length, None, convention)),
        feed_forward=layers * dense_feed_forward_flops(config),
        output=output_flops(config),
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
