"""Ministral 3 in GGUF: llama.cpp's mistral3."""

from __future__ import annotations

from typing import Any

from mt_models.blocks.gguf_decoder import (
    DENSE,
    read_shape,
    refuse_window,
    require_scaling,
    tied_output,
    write_query_scaling,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata
from mt_models.mistral.gguf import name_map

BETA, MULTIPLIER = "llama_4_scaling_beta", "rope.scaling.yarn_log_multiplier"


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    table: dict[str, Any] = {
        **(shape.pop("rope_scaling") or {"rope_type": "default"}),
        "rope_theta": shape.pop("rope_theta"),
        BETA: metadata.get("attention.temperature_scale", float) or 0.0,
    }
    if (multiplier := metadata.get(MULTIPLIER, float)) is not None:
        table |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {**shape, "rope_parameters": table}


def write(external: External) -> dict[str, Any]:
    table = dict(external["rope_parameters"])
    flat = {**external, "rope_theta": table.pop("rope_theta"), "rope_scaling": table}
    require_scaling(flat, ("yarn",), "mistral3")
    refuse_window(external, "mistral3")
    return {**write_query_scaling(table, "mistral3"), **write_shape({**flat, "rope_scaling": without_mscale(table)})}


def without_mscale(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("mscale", "mscale_all_dim", BETA)}


MINISTRAL3 = GGUFArchitecture(name="mistral3", model_type="ministral3", keys=DENSE, read=read, write=write)

GGUF = GGUFFamily(family="ministral3", architectures=(MINISTRAL3,), name_map=name_map, copies=tied_output)
