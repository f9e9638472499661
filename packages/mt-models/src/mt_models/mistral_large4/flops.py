"""FLOPs of Mistral Large 4 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_core.config.schema import Config
from mt_models.deepseek_v32.flops import SparseFlops
from mt_models.deepseek_v32.flops import flops_per_token as indexed_flops_per_token
from mt_models.flops import Convention
from mt_models.mistral_large4.config import MistralLarge4Config


def flops_per_token(config: MistralLarge4Config, seq_length: int, *, convention: Convention = "seen") -> SparseFlops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    counted = indexed_flops_per_token(config, seq_length, convention=convention)
    return replace(counted, attention_projections=sum(projection_flops(config, i) for i in range(config.num_layers)))


def projection_flops(config: MistralLarge4Config, layer: int) -> float:
    """FLOPs of one layer's projections: queries, the latents that it computes, keys and values, and the output."""
    sized = config.of_layer(layer)
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    latent_projection = hidden * (latent + sized.qk_pos_emb_head_dim) if config.kv_source_of(layer) == layer else 0
    keys_values = latent * heads * (sized.qk_head_dim + config.v_head_dim)
    return 2.0 * (
        hidden * heads * config.head_dim + latent_projection + keys_values + heads * config.v_head_dim * hidden
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
