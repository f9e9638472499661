"""Qwen 2 and 3 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    QK_NORMS,
    attention,
    decoder_map,
    feed_forward,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.gguf_tower import read_as_text
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, require
from mt_models.qwen.config import QwenConfig


def name_map(config: QwenConfig) -> NameMap:
    layer = [
        *norms(PRE_NORMS),
        *(norms(QK_NORMS) if config.qk_layernorm else ()),
        *attention(config, bias=config.add_qkv_bias),
        *feed_forward(),
    ]
    return decoder_map(config, layer)


def write(external: External) -> dict[str, Any]:
    require(external, "use_sliding_window", (False, None), str(external["model_type"]))
    return write_shape(external)


ARCHITECTURES = tuple(
    GGUFArchitecture(name=name, model_type=name, keys=DENSE, read=read_shape, write=write)
    for name in ("qwen2", "qwen3")
)

# Decoders of models with an image tower, whose positions are the same in texts; they are read and not written.
WITH_TOWER = tuple(
    GGUFArchitecture(name, kind, DENSE, read_as_text(name, read_shape), write, applies=lambda external: False)
    for name, kind in (("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"))
)

GGUF = GGUFFamily(family="qwen", architectures=(*ARCHITECTURES, *WITH_TOWER), name_map=name_map, copies=tied_output)
