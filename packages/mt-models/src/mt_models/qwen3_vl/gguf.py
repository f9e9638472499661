"""The decoder of Qwen3-VL in GGUF. Files are read as Qwen3, see qwen/gguf.py and qwen_moe/gguf.py."""

from __future__ import annotations

from typing import Any

from mt_core.errors import CheckpointError
from mt_core.name_map import NameMap
from mt_models.blocks.gguf_tower import decoder_beside_tower, write_decoder
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata, require
from mt_models.qwen3_vl.config import Qwen3VLConfig
from mt_models.qwen3_vl.hugging_face import DENSE, SPARSE, tower_rules


def name_map(config: Qwen3VLConfig) -> NameMap:
    return decoder_beside_tower(config.decoder, tower_rules(config.vision_model))


def not_read(metadata: Metadata) -> dict[str, Any]:
    raise CheckpointError("the file holds a decoder alone, without the image tower of model.family=qwen3_vl")


def write(external: External) -> dict[str, Any]:
    return {
        **write_decoder(external["text_config"], "qwen3vl"),
        "n_deepstack_layers": len(external["vision_config"]["deepstack_visual_indexes"]),
    }


def write_experts(external: External) -> dict[str, Any]:
    text = external["text_config"]
    require(text, "mlp_only_layers", ([], None), "qwen3vlmoe")
    return {
        **write(external),
        "expert_count": text["num_experts"],
        "expert_used_count": text["num_experts_per_tok"],
        "expert_feed_forward_length": text["moe_intermediate_size"],
    }


GGUF = GGUFFamily(
    family="qwen3_vl",
    architectures=tuple(
        GGUFArchitecture(kind.replace("_", ""), kind, (), not_read, writer, fits=lambda metadata: False)
        for kind, writer in ((DENSE, write), (SPARSE, write_experts))
    ),
    name_map=name_map,
)
