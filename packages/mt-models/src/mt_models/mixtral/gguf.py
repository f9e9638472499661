"""Mixtral in GGUF: the architecture llama with experts."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    PRE_NORMS,
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
from mt_models.mixtral.config import MixtralConfig


def name_map(config: MixtralConfig) -> NameMap:
    layer = [*norms(PRE_NORMS), *attention(config, neighbours=True), *mixed_feed_forward(config)]
    return decoder_map(config, layer)


def write(external: External) -> dict[str, Any]:
    require(external, "sliding_window", (None,), "llama")
    return write_shape(external)


def has_experts(metadata: Metadata) -> bool:
    return bool(metadata.get("expert_count", int))


MIXTRAL = GGUFArchitecture(
    name="llama",
    model_type="mixtral",
    keys=(*DENSE, Key("expert_count", "num_local_experts"), *EXPERT_COUNTS),
    read=read_shape,
    write=write,
    fits=has_experts,
    further=frequency_factors,
)

GGUF = GGUFFamily(family="mixtral", architectures=(MIXTRAL,), name_map=name_map, copies=tied_output)
