"""Mistral 4 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_models.blocks.gguf_decoder import tied_output, write_query_scaling
from mt_models.deepseek import gguf as deepseek
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata, require
from mt_models.ministral3.gguf import BETA, MULTIPLIER, without_mscale


def read(metadata: Metadata) -> dict[str, Any]:
    values = deepseek.read(metadata)
    table = {
        **(values.pop("rope_scaling") or {"rope_type": "default"}),
        "rope_theta": values.pop("rope_theta"),
        BETA: metadata.get("attention.temperature_scale", float) or 0.0,
    }
    if (multiplier := metadata.get(MULTIPLIER, float)) is not None:
        table |= {"mscale": 1.0, "mscale_all_dim": round(10 * multiplier, 6)}
    return {**values, "rope_parameters": table, "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool))}


def write(external: External) -> dict[str, Any]:
    require(external, "norm_topk_prob", (True,), "mistral4")
    table = dict(external["rope_parameters"])
    base = table.pop("rope_theta")
    scaled = write_query_scaling(table, "mistral4")
    # A tenth of what it is for other architectures, as that of DeepSeek.
    if MULTIPLIER in scaled:
        scaled[MULTIPLIER] *= 0.1
    return {
        **deepseek.write({**external, "rope_theta": base, "rope_scaling": without_mscale(table)}),
        **scaled,
    }


MISTRAL4 = GGUFArchitecture("mistral4", "mistral4", deepseek.KEYS, read, write)

GGUF = GGUFFamily(family="mistral4", architectures=(MISTRAL4,), name_map=deepseek.name_map, copies=tied_output)
