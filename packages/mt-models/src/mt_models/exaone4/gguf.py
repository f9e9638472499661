"""EXAONE 4 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    BRANCH_NORMS,
    DENSE,
    QK_NORMS,
    attention,
    decoder_map,
    feed_forward,
    frequency_factors,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.exaone4.config import Exaone4Config
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata, require

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LAYERS, PERIOD = 64, 4
"""llama.cpp has windows in models of so many layers alone, and one layer without in every PERIOD."""


def name_map(config: Exaone4Config) -> NameMap:
    return decoder_map(config, [*norms(BRANCH_NORMS), *norms(QK_NORMS), *attention(config), *feed_forward()])


def read(metadata: Metadata) -> dict[str, Any]:
    layers, window = metadata.need("block_count", int), metadata.get(WINDOW, int)
    windows = {"sliding_window": window, "sliding_window_pattern": PERIOD} if window and layers == LAYERS else {}
    return {**read_shape(metadata), "sliding_window": None, **windows}


def write(external: External) -> dict[str, Any]:
    require(external, "head_dim", (external["hidden_size"] // external["num_attention_heads"],), "exaone4")
    values, window = write_shape(external), external.get("sliding_window")
    if window is None:
        return values
    require(external, "num_hidden_layers", (LAYERS,), "exaone4 with a sliding_window")
    kinds = list(external["layer_types"])
    require(external, "layer_types", ([SLIDING if (i + 1) % PERIOD else FULL for i in range(LAYERS)],), "exaone4")
    return {**values, WINDOW: window, PATTERN: [kind == SLIDING for kind in kinds]}


EXAONE4 = GGUFArchitecture(
    name="exaone4", model_type="exaone4", keys=DENSE, read=read, write=write, further=frequency_factors
)

GGUF = GGUFFamily(family="exaone4", architectures=(EXAONE4,), name_map=name_map, copies=tied_output)
