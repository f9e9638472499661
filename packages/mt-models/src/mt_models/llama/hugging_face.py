"""Llama in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
    rope_to_ours,
    rope_to_theirs,
    shape_to_theirs,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.llama.config import LlamaConfig


def name_map(config: LlamaConfig) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *feed_forward_rules(bias=config.mlp_bias),
    ]
    return decoder_name_map(config, layer)


def further_back(model: Mapping[str, Any]) -> dict[str, Any]:
    config = LlamaConfig.model_validate(model)
    return {**shape_to_theirs(config), **rope_to_theirs(config)}


LLAMA = ConfigMap(
    architecture="llama",
    fields=(
        *decoder_fields(tied=False, positions=2048),
        Field("num_key_value_heads", "num_query_groups"),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "attention_bias", default=False),
        Field("mlp_bias", "mlp_bias", default=False),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored=IGNORED,
    further=rope_to_ours,
    further_keys=ROPE_KEYS,
    further_back=further_back,
)

HUGGING_FACE = HuggingFaceFamily(
    family="llama",
    model_types={"llama": LLAMA},
    name_map=name_map,
    copies=tied_output,
    architectures={"llama": "LlamaForCausalLM"},
)
