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
    export_rope,
    export_shape,
    feed_forward_rules,
    import_rope,
    norm_rules,
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


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = LlamaConfig.model_validate(model)
    return {**export_shape(config), **export_rope(config)}


LLAMA = ConfigMap(
    architecture="llama",
    fields=(
        *decoder_fields(tied=False, positions=2048),
        Field("num_key_value_heads", "num_query_groups"),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "attention_bias", default=False),
        Field("mlp_bias", "mlp_bias", default=False),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("is_llama_config", (True,), written=False),
        Fixed("rope_interleaved", (False,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={**IGNORED, "max_sequence_length": "repeats max_position_embeddings, which the class reads"},
    import_extra=import_rope,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="llama",
    model_types={"llama": LLAMA},
    name_map=name_map,
    copies=tied_output,
    architectures={"llama": "LlamaForCausalLM"},
)
