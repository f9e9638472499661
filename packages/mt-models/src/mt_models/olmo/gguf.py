"""OLMo 2 and 3 in GGUF, both as olmo2."""

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
    norms,
    read_shape,
    require_scaling,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.olmo.config import OlmoConfig

WINDOW = "attention.sliding_window"
PERIOD = 4
"""With a window, every so many layers one attends to all positions; llama.cpp has it fixed."""


def name_map(config: OlmoConfig) -> NameMap:
    return decoder_map(config, [*norms(BRANCH_NORMS), *norms(QK_NORMS), *attention(config), *feed_forward()])


def _kinds(layers: int) -> list[str]:
    return [SLIDING if (i + 1) % PERIOD else FULL for i in range(layers)]


def has_windows(metadata: Metadata) -> bool:
    return bool(metadata.get(WINDOW, int))


def read_olmo3(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    base, scaling = shape.pop("rope_theta"), shape.pop("rope_scaling") or {"rope_type": "default"}
    tables = {FULL: {**scaling, "rope_theta": base}, SLIDING: {"rope_type": "default", "rope_theta": base}}
    return {**shape, "rope_parameters": tables, "layer_types": _kinds(metadata.need("block_count", int))}


def write_olmo2(external: External) -> dict[str, Any]:
    require(external, "tie_word_embeddings", (False,), "olmo2")
    require(external, "attention_bias", (False,), "olmo2")
    require(external, "head_dim", (external["hidden_size"] // external["num_attention_heads"],), "olmo2")
    require_scaling(external, ("default", "linear", "yarn"), "olmo2")
    return write_shape(external)


def write_olmo3(external: External) -> dict[str, Any]:
    require(external, "layer_types", (_kinds(external["num_hidden_layers"]),), "olmo2")
    tables = external.get("rope_parameters")
    if tables is None:
        return write_olmo2(external)
    local, whole = tables[SLIDING]["rope_theta"], dict(tables[FULL])
    base = whole.pop("rope_theta")
    # One base for all layers.
    require({"rope_parameters.sliding_attention.rope_theta": local}, "rope_parameters.sliding_attention.rope_theta",
            (base,), "olmo2")  # fmt: skip
    return write_olmo2({**external, "rope_theta": base, "rope_scaling": whole})


OLMO2 = GGUFArchitecture(
    name="olmo2",
    model_type="olmo2",
    keys=DENSE,
    read=read_shape,
    write=write_olmo2,
    fits=lambda metadata: not has_windows(metadata),
)
OLMO3 = GGUFArchitecture(
    name="olmo2",
    model_type="olmo3",
    keys=(*DENSE, Key(WINDOW, "sliding_window")),
    read=read_olmo3,
    write=write_olmo3,
    fits=has_windows,
)

GGUF = GGUFFamily(family="olmo", architectures=(OLMO2, OLMO3), name_map=name_map)
