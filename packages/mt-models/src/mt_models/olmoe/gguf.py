"""OLMoE in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    PRE_NORMS,
    QK_NORMS,
    attention,
    decoder_map,
    mixed_feed_forward,
    norms,
    read_even_shape,
    tied_output,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.olmoe.config import OlmoeConfig


def name_map(config: OlmoeConfig) -> NameMap:
    layer = [*norms(PRE_NORMS), *norms(QK_NORMS), *attention(config), *mixed_feed_forward(config)]
    return decoder_map(config, layer)


def read(metadata: Metadata) -> dict[str, Any]:
    return {**read_even_shape(metadata), "norm_topk_prob": False}


def write(external: External) -> dict[str, Any]:
    require(external, "norm_topk_prob", (False,), "olmoe")
    require(external, "clip_qkv", (None,), "olmoe")
    # Norms of all heads together; llama.cpp has one size for those of queries and keys.
    require(external, "num_key_value_heads", (external["num_attention_heads"],), "olmoe")
    return write_shape(external)


OLMOE = GGUFArchitecture(
    name="olmoe",
    model_type="olmoe",
    keys=(*DENSE, Key("expert_count", "num_experts"), *EXPERT_COUNTS),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="olmoe", architectures=(OLMOE,), name_map=name_map, copies=tied_output)
