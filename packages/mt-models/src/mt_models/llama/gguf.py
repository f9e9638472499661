"""Llama in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    attention,
    decoder_map,
    feed_forward,
    frequency_factors,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.gguf import GGUFArchitecture, GGUFFamily, Metadata
from mt_models.llama.config import LlamaConfig


def name_map(config: LlamaConfig) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norms(PRE_NORMS),
        *attention(config, bias=bias, output_bias=bias, neighbours=True),
        *feed_forward(bias=config.mlp_bias),
    ]
    return decoder_map(config, layer)


def is_dense(metadata: Metadata) -> bool:
    """Mixtral's files have the same architecture."""
    return not metadata.get("expert_count", int)


def read(metadata: Metadata) -> dict[str, Any]:
    biases = {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
    }
    return {**read_shape(metadata), **{key: True for key, there in biases.items() if there}}


LLAMA = GGUFArchitecture(
    name="llama",
    model_type="llama",
    keys=DENSE,
    read=read,
    write=write_shape,
    fits=is_dense,
    further=frequency_factors,
)

GGUF = GGUFFamily(family="llama", architectures=(LLAMA,), name_map=name_map, copies=tied_output)
