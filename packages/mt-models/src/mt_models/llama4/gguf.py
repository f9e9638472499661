"""Llama 4 (text) in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    EPSILON,
    PRE_NORMS,
    SIZES,
    attention,
    decoder_map,
    frequency_factors,
    mixed_feed_forward,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.llama4.config import Llama4Config

STEP = "interleave_moe_layer_step"
INTERVAL, CHUNK = 4, 8192
MAVERICK = 128
"""Models of so many experts have no norms of queries and keys in llama.cpp, all others have them."""


def name_map(config: Llama4Config) -> NameMap:
    # Adjacent channels are rotated here and there.
    return decoder_map(config, [*norms(PRE_NORMS), *attention(config), *mixed_feed_forward(config)])


def read(metadata: Metadata) -> dict[str, Any]:
    layers, step = metadata.need("block_count", int), metadata.need(STEP, int)
    experts = metadata.need("expert_count", int)
    return {
        **read_shape(metadata),
        "use_qk_norm": experts != MAVERICK,
        "moe_layers": [layer for layer in range(layers) if (layer + 1) % step == 0],
        "no_rope_layer_interval": INTERVAL,
        "attention_chunk_size": CHUNK,
    }


def write(external: External) -> dict[str, Any]:
    layers, experts = external["num_hidden_layers"], external["num_local_experts"]
    fixed: dict[str, Any] = {
        "attention_bias": False,
        "attention_chunk_size": CHUNK,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": CHUNK,
        "no_rope_layers": [int((layer + 1) % INTERVAL != 0) for layer in range(layers)],
        "use_qk_norm": experts != MAVERICK,
    }
    for key, value in fixed.items():
        require(external, key, (value,), "llama4")
    return {**write_shape(external), STEP: step_of(list(external["moe_layers"]), layers)}


def step_of(sparse: list[int], layers: int) -> int:
    """Every how many layers one has experts. Raises ConfigError for another order."""
    step = sparse[0] + 1 if sparse else layers + 1
    if sparse != list(range(step - 1, layers, step)) or not sparse:
        raise ConfigError(
            f"moe_layers={sparse} cannot be written as GGUF of the architecture llama4, in which every n-th layer has "
            "experts"
        )
    return step


LLAMA4 = GGUFArchitecture(
    name="llama4",
    model_type="llama4_text",
    keys=(
        *SIZES,
        EPSILON,
        Key("feed_forward_length", "intermediate_size_mlp"),
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("expert_count", "num_local_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
    ),
    read=read,
    write=write,
    further=frequency_factors,
)

GGUF = GGUFFamily(family="llama4", architectures=(LLAMA4,), name_map=name_map, copies=tied_output)
