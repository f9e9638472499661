"""dots.llm1 in GGUF."""

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
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.dots1.config import Dots1Config
from mt_models.dots1.hugging_face import DENSE_LAYERS, DOTS
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require


def name_map(config: Dots1Config) -> NameMap:
    heads = norms(QK_NORMS) if config.qk_layernorm else ()
    return decoder_map(config, [*norms(PRE_NORMS), *heads, *attention(config), *mixed_feed_forward(config)])


def read(metadata: Metadata) -> dict[str, Any]:
    return {
        **read_shape(metadata),
        "sliding_window": None,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool)),
    }


def write(external: External) -> dict[str, Any]:
    # llama.cpp has as many heads of keys as of queries, as the published model.
    require(external, "num_key_value_heads", (external["num_attention_heads"],), DOTS)
    require(external, BIAS_KEY, (True, None), DOTS)
    require(external, "n_group", (1, None), DOTS)
    require(external, "norm_topk_prob", (True,), DOTS)
    require_scaling(external, ("default", "linear", "yarn"), DOTS)
    return {**write_shape(external), "expert_gating_func": SIGMOID, "expert_weights_norm": True}


DOTS1 = GGUFArchitecture(
    name="dots1",
    model_type=DOTS,
    keys=(
        *DENSE,
        Key("expert_count", "n_routed_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "n_shared_experts"),
        Key("leading_dense_block_count", DENSE_LAYERS),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="dots1", architectures=(DOTS1,), name_map=name_map, copies=tied_output)
