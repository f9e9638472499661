"""Configuration of the Mamba family, its published sizes and its FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.mamba_config import MambaLayerConfig, check_mamba_layers
from mt_models.flops import Convention, Flops


class MambaConfig(MambaLayerConfig):
    """Mamba-2 (Dao and Gu, 2024)."""

    num_layers: PositiveInt
    """Mamba layers."""

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(self.num_layers if self.use_scaled_init_method else 1.0)

    @property
    def normalization(self) -> Literal["RMSNorm"]:
        return "RMSNorm"


def check_mamba(config: Config) -> None:
    check_mamba_layers(config)


# -- published sizes ---------------------------------------------------------------------------------


def _mamba2(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "vocab_size": 50288,  # GPT-NeoX's 50277, rounded up to a multiple of 16 in the published weights
            "mamba_num_groups": 1,
            "mamba_chunk_size": 256,
            "untie_embeddings_and_output_weights": False,
            "fp32_residual_connection": True,
        },
        "data": {"seq_length": 2048},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "mamba2-130m": _mamba2(24, 768),
    "mamba2-370m": _mamba2(48, 1024),
    "mamba2-780m": _mamba2(48, 1536),
    "mamba2-1.3b": _mamba2(48, 2048),
    "mamba2-2.7b": _mamba2(64, 2560),
}


# -- FLOPs for each token ----------------------------------------------------------------------------
#
# Counted as for transformers (mt_models.flops), with the products of the chunked scan and the convolution.


@dataclass(frozen=True)
class MambaFlops(Flops):
    """Forward FLOPs for each token, over all layers."""

    projections: float
    """Into and out of the mixers."""
    convolution: float
    scan: float
    """Scores within chunks and their product with the inputs; states written and read."""
    output: float
    """Logits."""


def flops_per_token(config: MambaConfig, seq_length: int, *, convention: Convention = "seen") -> MambaFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    return MambaFlops(
        projections=config.num_layers * projection_flops(config),
        convolution=config.num_layers * convolution_flops(config),
        scan=config.num_layers * scan_flops(config, seq_length, convention),
        output=output_flops(config),
    )


def projection_flops(config: MambaLayerConfig) -> float:
    """FLOPs of one layer's projections."""
    inner, shared = config.mamba_inner_size, config.mamba_num_groups * config.mamba_state_dim
    # z and x (2 inner), B and C (2 shared), dt (heads); the last inner is out_proj's
    return 2 * config.hidden_size * (2 * inner + 2 * shared + config.mamba_heads + inner)


def convolution_flops(config: MambaLayerConfig) -> float:
    """FLOPs of one layer's convolution."""
    channels = config.mamba_inner_size + 2 * config.mamba_num_groups * config.mamba_state_dim
    # x, B and C are convolved, each channel with its own taps.
    return 2 * channels * config.mamba_conv_kernel


def scan_flops(config: MambaLayerConfig, seq_length: int, convention: Convention) -> float:
    """FLOPs of one layer's scan. full: whole chunks, filled ones included; seen: positions up to a token's own in its
    chunk."""
    size = min(config.mamba_chunk_size, seq_length)
    inner, state = config.mamba_inner_size, config.mamba_state_dim
    whole, rest = divmod(seq_length, size)
    if convention == "full":
        # The last chunk is filled with zeros to its full size: tokens counts these too, as a share of the real ones.
        tokens = (whole + (rest > 0)) * size / seq_length
        partners = tokens * size
    else:
        tokens = 1.0
        # Position l of a chunk (from 1) has l partners, itself included: 1 + 2 + ... + size in a whole chunk.
        partners = (whole * size * (size + 1) + rest * (rest + 1)) / 2 / seq_length
    # Scores c . b of each group (N), and their product with x of every head (inner).
    within = 2 * partners * (config.mamba_num_groups * state + inner)
    # Between chunks: each token is written to the state (2 inner N) and read from it (2 inner N).
    return within + tokens * 4 * inner * state


def output_flops(config: MambaLayerConfig) -> float:
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size is not set, and the output layer's FLOPs depend on it")
    return 2 * config.hidden_size * config.vocab_size


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
