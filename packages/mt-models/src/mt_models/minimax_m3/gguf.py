"""MiniMax-M3, text, in GGUF: llama.cpp's minimax-m3."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.gguf_decoder import (
    EPSILON,
    EXPERT_COUNTS,
    PRE_NORMS,
    QK_NORMS,
    SIGMOID,
    SIZES,
    attention,
    decoder_map,
    experts,
    feed_forward,
    norms,
    read_shape,
    require_scaling,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, PlusOne, require
from mt_models.minimax_m3.config import MiniMaxM3Config
from mt_models.minimax_m3.hugging_face import SPARSE, TEXT

NAME = "minimax-m3"

# -- tensors -----------------------------------------------------------------------------------------

INDEXER = {
    "self_attention.indexer.linear_q": "indexer.q_proj",
    "self_attention.indexer.linear_k": "indexer.k_proj",
}
INDEXER_NORMS = {
    "self_attention.indexer.q_layernorm": "indexer.q_norm",
    "self_attention.indexer.k_layernorm": "indexer.k_norm",
}


def name_map(config: MiniMaxM3Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in _layer(config, number)]
    return decoder_map(config, layers, norm_rule=PlusOne)


def _layer(config: MiniMaxM3Config, number: int) -> list[Rule]:
    moe = MoEOptions(config)
    rules = [*norms({**PRE_NORMS, **QK_NORMS}, rule=PlusOne), *attention(config)]
    rules += experts(moe) if moe.layers[number] else feed_forward()
    if config.sparse_layers[number]:
        rules += [*norms(INDEXER), *norms(INDEXER_NORMS, rule=PlusOne)]
    return [rule.for_layer(number) for rule in rules]


# -- configuration -----------------------------------------------------------------------------------

DENSE_LAYERS, SHARED = "leading_dense_block_count", "expert_shared_count"
KINDS, EXPERT_KINDS = "layer_types", "mlp_layer_types"


def read(metadata: Metadata) -> dict[str, Any]:
    shape, layers = read_shape(metadata), metadata.need("block_count", int)
    rotated = metadata.get("rope.dimension_count", int) or shape["head_dim"]
    dense = metadata.get(DENSE_LAYERS, int) or 0
    blocks = [metadata.has_tensor(f"blk.{layer}.indexer.q_proj.weight") for layer in range(layers)]
    width = metadata.need("expert_feed_forward_length", int)
    return {
        **shape,
        "rotary_dim": rotated,
        "partial_rotary_factor": rotated / shape["head_dim"],
        "shared_intermediate_size": width * (metadata.get(SHARED, int) or 1),
        KINDS: [SPARSE if there else FULL for there in blocks],
        EXPERT_KINDS: ["dense"] * dense + ["sparse"] * (layers - dense),
    }


def write(external: External) -> dict[str, Any]:
    dense = external[EXPERT_KINDS].count("dense")
    _require_expressed(external, dense)
    return {
        **write_shape(external),
        "rope.dimension_count": external["rotary_dim"],
        DENSE_LAYERS: dense,
        SHARED: external["shared_intermediate_size"] // external["intermediate_size"],
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
    }


def _require_expressed(external: External, dense: int) -> None:
    """Raises ConfigError for layers of other kinds than llama.cpp computes: dense ones, which attend to all keys, and
    then those with experts, which attend to chosen blocks."""
    require(external, "tie_word_embeddings", (False,), NAME)
    require(external, BIAS_KEY, (True, None), NAME)
    # An indexer's head chooses for one key-value head.
    require(external, "index_n_heads", (external["num_key_value_heads"],), NAME)
    require_scaling(external, ("default", "linear", "yarn"), NAME)
    rest = external["num_hidden_layers"] - dense
    for key, first, second in ((EXPERT_KINDS, "dense", "sparse"), (KINDS, FULL, SPARSE)):
        if list(external[key]) != [first] * dense + [second] * rest:
            raise ConfigError(
                f"{key}={list(external[key])} cannot be written as GGUF of the architecture {NAME}; it can be "
                f"{[first] * dense + [second] * rest}"
            )
    if external["shared_intermediate_size"] % external["intermediate_size"]:
        raise ConfigError(
            f"shared_intermediate_size={external['shared_intermediate_size']} cannot be written as GGUF of the "
            f"architecture {NAME}; it can be a multiple of intermediate_size={external['intermediate_size']}"
        )


MINIMAX_M3 = GGUFArchitecture(
    name=NAME,
    model_type=TEXT,
    keys=(
        *SIZES,
        EPSILON,
        Key("feed_forward_length", "dense_intermediate_size"),
        Key("expert_count", "num_local_experts"),
        *EXPERT_COUNTS,
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
        Key("attention.indexer.head_count", "index_n_heads"),
        Key("attention.indexer.key_length", "index_head_dim"),
        Key("attention.indexer.top_k", "index_topk_blocks"),
        Key("attention.indexer.block_size", "index_block_size"),
        Key("attention.indexer.local_blocks", "index_local_blocks", int, 1),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="minimax_m3", architectures=(MINIMAX_M3,), name_map=name_map)
