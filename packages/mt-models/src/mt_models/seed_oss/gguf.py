"""Seed-OSS in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    NORMS_BEHIND_ATTENTION,
    attention,
    decoder_map,
    feed_forward,
    norms,
    read_shape,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata, require
from mt_models.seed_oss.config import SeedOssConfig


def name_map(config: SeedOssConfig) -> NameMap:
    layer = [*norms(NORMS_BEHIND_ATTENTION), *attention(config, bias=config.attention_bias), *feed_forward()]
    return decoder_map(config, layer)


def read(metadata: Metadata) -> dict[str, Any]:
    # Dropout of the class: GGUF has none.
    without = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    return {**read_shape(metadata), **without, "attention_bias": metadata.has_tensor("blk.0.attn_q.bias")}


def write(external: External) -> dict[str, Any]:
    for key in ("attention_out_bias", "mlp_bias"):
        require(external, key, (False,), "seed_oss")
    require_scaling(external, ("default", "linear", "yarn"), "seed_oss")
    return write_shape(external)


SEED_OSS = GGUFArchitecture(name="seed_oss", model_type="seed_oss", keys=DENSE, read=read, write=write)

GGUF = GGUFFamily(family="seed_oss", architectures=(SEED_OSS,), name_map=name_map, copies=tied_output)
