"""The decoder of Qwen2.5-VL in GGUF. Files are read as Qwen2, see qwen/gguf.py."""

from __future__ import annotations

from typing import Any

from mt_core.errors import CheckpointError
from mt_core.name_map import NameMap
from mt_models.blocks.gguf_tower import decoder_beside_tower, write_decoder
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Metadata
from mt_models.qwen_vl.config import QwenVLConfig
from mt_models.qwen_vl.hugging_face import tower_rules

NAME = "qwen2vl"
"""The architecture of the decoders of Qwen2-VL and Qwen2.5-VL, which are the same."""


def name_map(config: QwenVLConfig) -> NameMap:
    return decoder_beside_tower(config.decoder, tower_rules(config.vision_model))


def not_read(metadata: Metadata) -> dict[str, Any]:
    raise CheckpointError("the file holds a decoder alone, without the image tower of model.family=qwen_vl")


def write(external: External) -> dict[str, Any]:
    return write_decoder(external, NAME)


QWEN2_VL = GGUFArchitecture(NAME, "qwen2_5_vl", (), not_read, write, fits=lambda metadata: False)
GGUF = GGUFFamily(family="qwen_vl", architectures=(QWEN2_VL,), name_map=name_map)
