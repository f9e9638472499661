"""MiniMax-M2 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    attention,
    decoder_map,
    mixed_feed_forward,
    norms,
    read_shape,
    require_scaling,
    write_shape,
)
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.minimax_m2.config import MiniMaxM2Config


def name_map(config: MiniMaxM2Config) -> NameMap:
    layer = [*norms(PRE_NORMS), *norms(QK_NORMS), *attention(config), *mixed_feed_forward(config)]
    return decoder_map(config, layer)


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    return {**shape, "rotary_dim": metadata.get("rope.dimension_count", int) or shape["head_dim"]}


def write(external: External) -> dict[str, Any]:
    require(external, "tie_word_embeddings", (False,), "minimax-m2")
    require(external, BIAS_KEY, (True, None), "minimax-m2")
    require_scaling(external, ("default", "linear", "yarn"), "minimax-m2")
    return {
        **write_shape(external),
        "rope.dimension_count": external["rotary_dim"],
        "expert_feed_forward_length": external["intermediate_size"],
        "expert_gating_func": SIGMOID,
    }


MINIMAX_M2 = GGUFArchitecture(
    name="minimax-m2",
    model_type="minimax_m2",
    keys=(*DENSE, Key("expert_count", "num_local_experts"), *EXPERT_COUNTS),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="minimax_m2", architectures=(MINIMAX_M2,), name_map=name_map)
