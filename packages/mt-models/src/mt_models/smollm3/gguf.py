"""SmolLM3 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
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
from mt_models.smollm3.config import SmolLM3Config

INTERVAL = 4
"""Every so many layers one has no positions; llama.cpp has it fixed."""


def name_map(config: SmolLM3Config) -> NameMap:
    return decoder_map(config, [*norms(PRE_NORMS), *attention(config, neighbours=True), *feed_forward()])


def read(metadata: Metadata) -> dict[str, Any]:
    return {**read_shape(metadata), "no_rope_layer_interval": INTERVAL}


def write(external: External) -> dict[str, Any]:
    rotates = [int((layer + 1) % INTERVAL != 0) for layer in range(external["num_hidden_layers"])]
    require(external, "no_rope_layers", (rotates,), "smollm3")
    for key in ("attention_bias", "mlp_bias"):
        require(external, key, (False,), "smollm3")
    require_scaling(external, ("default", "linear", "yarn"), "smollm3")
    return write_shape(external)


SMOLLM3 = GGUFArchitecture(name="smollm3", model_type="smollm3", keys=DENSE, read=read, write=write)

GGUF = GGUFFamily(family="smollm3", architectures=(SMOLLM3,), name_map=name_map, copies=tied_output)
