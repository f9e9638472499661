"""Phi-3 and Phi-4 in GGUF, with the factors of long sequences as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.name_map import GroupedQKV, NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    OURS,
    PRE_NORMS,
    THEIRS,
    decoder_map,
    head_size,
    norms,
    read_shape,
    refuse_window,
    require_scaling,
    tied_output,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata, decimals, require
from mt_models.phi3.config import Phi3Config

MATRICES = {
    "self_attention.linear_proj": "attn_output",
    "mlp.linear_fc1": "ffn_up",  # gate rows first
    "mlp.linear_fc2": "ffn_down",
}
FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ORIGINAL, ATTENTION_FACTOR = "original_max_position_embeddings", "rope.scaling.attn_factor"


def name_map(config: Phi3Config) -> NameMap:
    qkv = GroupedQKV(
        f"{OURS}self_attention.linear_qkv.weight",
        f"{THEIRS}attn_qkv.weight",
        groups=config.query_groups,
        heads=config.num_attention_heads,
    )
    return decoder_map(config, [*norms(PRE_NORMS), qkv, *norms(MATRICES)], ignored=tuple(FACTORS.values()))


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    rotated = metadata.get("rope.dimension_count", int) or shape["head_dim"]
    return {
        **shape,
        "partial_rotary_factor": rotated / shape["head_dim"],
        "sliding_window": metadata.get("attention.sliding_window", int) or None,
        **(_read_factors(metadata) if metadata.has_tensor(FACTORS["long_factor"]) else {}),
    }


def _read_factors(metadata: Metadata) -> dict[str, Any]:
    original = metadata.need("rope.scaling.original_context_length", int)
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    scaling |= {key: decimals(metadata.tensor(name)) for key, name in FACTORS.items()}
    factor = metadata.get(ATTENTION_FACTOR, float) or 1.0
    usual = attention_factor({"max_position_embeddings": metadata.need("context_length", int), ORIGINAL: original})
    if not math.isclose(factor, usual, rel_tol=1e-6):
        scaling["attention_factor"] = factor
    return {"rope_scaling": scaling, ORIGINAL: original}


def attention_factor(external: External) -> float:
    """What cosines and sines of longrope are multiplied by, by the lengths, unless the file says another."""
    stated = (external.get("rope_scaling") or {}).get("attention_factor")
    if stated is not None:
        return float(stated)
    scale = external["max_position_embeddings"] / external[ORIGINAL]
    return math.sqrt(1 + math.log(scale) / math.log(external[ORIGINAL])) if scale > 1 else 1.0


def write(external: External) -> dict[str, Any]:
    require_scaling(external, ("default", "linear", "yarn", "longrope"), "phi3")
    require(external, "head_dim", (external["hidden_size"] // external["num_attention_heads"],), "phi3")
    refuse_window(external, "phi3")
    long = _is_long(external)
    values = write_shape({**external, "rope_scaling": None} if long else external)
    values["rope.dimension_count"] = int(head_size(external) * float(external.get("partial_rotary_factor", 1.0)))
    if long:
        values |= {
            "rope.scaling.original_context_length": external[ORIGINAL],
            ATTENTION_FACTOR: attention_factor(external),
        }
    return values


def _is_long(external: External) -> bool:
    return bool((external.get("rope_scaling") or {}).get("rope_type") == "longrope")


def factor_tensors(external: External) -> Mapping[str, Tensor]:
    """`further`: what each frequency is divided by, in sequences up to the original length and in longer ones."""
    if not _is_long(external):
        return {}
    return {name: torch.tensor(external["rope_scaling"][key]) for key, name in FACTORS.items()}


PHI3 = GGUFArchitecture(name="phi3", model_type="phi3", keys=DENSE, read=read, write=write, further=factor_tensors)

GGUF = GGUFFamily(family="phi3", architectures=(PHI3,), name_map=name_map, copies=tied_output)
