"""GPT-OSS in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap, Same
from mt_models.blocks.gguf_decoder import (
    DENSE,
    EXPERT_COUNTS,
    OURS,
    THEIRS,
    attention,
    decoder_map,
    experts,
    norms,
    read_shape,
    tied_output,
    write_shape,
)
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.gpt_oss.config import GptOssConfig

TRUNCATE = "rope.scaling.yarn_truncate"
"""Whether the range of YaRN is rounded, as llama.cpp rounds it: a key of mt's, which other programs leave unread."""
NORMS = {"input_layernorm": "attn_norm", "pre_mlp_layernorm": "post_attention_norm"}


def name_map(config: GptOssConfig) -> NameMap:
    layer = [
        *norms(NORMS),
        *attention(config, bias=True, output_bias=True),
        Same(f"{OURS}self_attention.core_attention.softmax_offset", f"{THEIRS}attn_sinks.weight"),
        *experts(MoEOptions(config), bias=True),
    ]
    return decoder_map(config, layer)


def _layer_types(number: int) -> list[str]:
    """llama.cpp has it fixed: the first of every two layers has a window."""
    return [SLIDING if layer % 2 == 0 else FULL for layer in range(number)]


def read(metadata: Metadata) -> dict[str, Any]:
    shape = read_shape(metadata)
    scaling = shape.pop("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        # Files of published models, whose range is not rounded, do not say it.
        scaling["truncate"] = bool(metadata.get(TRUNCATE, bool))
    return {**shape, "rope_scaling": scaling, "layer_types": _layer_types(metadata.need("block_count", int))}


def write(external: External) -> dict[str, Any]:
    require(external, "layer_types", (_layer_types(external["num_hidden_layers"]),), "gpt-oss")
    values = {**write_shape(external), "expert_feed_forward_length": external["intermediate_size"]}
    scaling = external.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn" and scaling.get("truncate", True):
        values[TRUNCATE] = True
    return values


GPT_OSS = GGUFArchitecture(
    name="gpt-oss",
    model_type="gpt_oss",
    keys=(
        *DENSE,
        Key("expert_count", "num_local_experts"),
        *EXPERT_COUNTS,
        Key("attention.sliding_window", "sliding_window"),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="gpt_oss", architectures=(GPT_OSS,), name_map=name_map, copies=tied_output)
