"""AFMoE (Arcee Trinity) in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Rule
from mt_models.afmoe.config import AfmoeConfig
from mt_models.blocks.gguf_decoder import (
    BRANCH_NORMS,
    DENSE,
    EXPERT_COUNTS,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    THEIRS,
    decoder_map,
    mixed_feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.blocks.hugging_face_grouped_rows import GroupedRows
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

NAME, PERIOD = "afmoe", 4
"""llama.cpp has one layer without a window and without positions in every PERIOD."""


def name_map(config: AfmoeConfig) -> NameMap:
    layer = [*norms({**PRE_NORMS, **BRANCH_NORMS, **QK_NORMS}), *_gated_attention(config), *mixed_feed_forward(config)]
    return decoder_map(config, layer)


def _gated_attention(config: AfmoeConfig) -> list[Rule]:
    queries = config.num_attention_heads // config.query_groups * config.head_dim
    return [
        GroupedRows(
            f"{OURS}self_attention.linear_qkv.weight",
            tuple(f"{THEIRS}attn_{part}.weight" for part in ("q", "gate", "k", "v")),
            groups=config.query_groups,
            rows=(queries, queries, config.head_dim, config.head_dim),
        ),
        *norms({"self_attention.linear_proj": "attn_output"}),
    ]


def read(metadata: Metadata) -> dict[str, Any]:
    return {
        **read_shape(metadata),
        "mup_enabled": True,
        "global_attn_every_n_layers": PERIOD,
        "route_norm": bool(metadata.get("expert_weights_norm", bool)),
    }


def write(external: External) -> dict[str, Any]:
    kinds = [SLIDING if (layer + 1) % PERIOD else FULL for layer in range(external["num_hidden_layers"])]
    require({**external, "layer_types": list(external["layer_types"])}, "layer_types", (kinds,), NAME)
    require(external, "mup_enabled", (True,), NAME)
    require(external, BIAS_KEY, (True, None), NAME)
    require_scaling(external, ("default", "linear", "yarn"), NAME)
    return {**write_shape(external), "expert_gating_func": SIGMOID, "expert_weights_norm": True}


AFMOE = GGUFArchitecture(
    name=NAME,
    model_type="afmoe",
    keys=(
        *DENSE,
        Key("attention.sliding_window", "sliding_window"),
        Key("leading_dense_block_count", "num_dense_layers", int, 0),
        Key("expert_count", "num_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "num_shared_experts"),
        Key("expert_weights_scale", "route_scale", float, 1.0),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="afmoe", architectures=(AFMOE,), name_map=name_map, copies=tied_output)
