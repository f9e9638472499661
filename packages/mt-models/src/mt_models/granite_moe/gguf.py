"""Granite MoE in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    GRANITE_FACTORS,
    PRE_NORMS,
    attention,
    decoder_map,
    experts,
    norms,
    read_attention_scale,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import GGUFArchitecture, GGUFFamily, Key, Metadata
from mt_models.granite_moe.config import GraniteMoeConfig


def name_map(config: GraniteMoeConfig) -> NameMap:
    layer = [*norms(PRE_NORMS), *attention(config, neighbours=True), *experts(MoEOptions(config))]
    return decoder_map(config, layer)


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    head_dim = shape.pop("head_dim")  # for which the class has no field
    return {**shape, **read_attention_scale(metadata, head_dim)}


GRANITE_MOE = GGUFArchitecture(
    name="granitemoe",
    model_type="granitemoe",
    keys=(*DENSE, *GRANITE_FACTORS, Key("expert_count", "num_local_experts"), *EXPERT_COUNTS),
    read=read,
    write=write_shape,
)

GGUF = GGUFFamily(family="granite_moe", architectures=(GRANITE_MOE,), name_map=name_map, copies=tied_output)
