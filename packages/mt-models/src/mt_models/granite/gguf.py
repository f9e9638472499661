"""Granite in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    GRANITE_FACTORS,
    PRE_NORMS,
    attention,
    decoder_map,
    feed_forward,
    norms,
    read_attention_scale,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.gguf import GGUFArchitecture, GGUFFamily, Metadata
from mt_models.granite.config import GraniteConfig


def name_map(config: GraniteConfig) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norms(PRE_NORMS),
        *attention(config, bias=bias, output_bias=bias, neighbours=True),
        *feed_forward(bias=config.mlp_bias),
    ]
    return decoder_map(config, layer)


def read(metadata: Metadata) -> dict[str, Any]:
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    shape = read_shape(metadata)
    scale = read_attention_scale(metadata, shape["head_dim"])
    return {**shape, **scale, **{key: metadata.has_tensor(name) for key, name in biases.items()}}


GRANITE = GGUFArchitecture(
    name="granite", model_type="granite", keys=(*DENSE, *GRANITE_FACTORS), read=read, write=write_shape
)

GGUF = GGUFFamily(family="granite", architectures=(GRANITE,), name_map=name_map, copies=tied_output)
