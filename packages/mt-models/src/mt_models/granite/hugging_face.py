"""Dense Granite models in Hugging Face's format."""

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
    feed_forward_rules,
    import_rope,
    norm_rules,
)
from mt_models.granite.config import GraniteConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

FACTORS = tuple(
    Field(name, name, import_value=float, default=1.0)
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
)


def name_map(config: GraniteConfig) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *feed_forward_rules(bias=config.mlp_bias),
    ]
    return decoder_name_map(config, layer)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = GraniteConfig.model_validate(model)
    return {
        **export_rope(config),
        "head_dim": config.head_dim,
        "num_key_value_heads": config.query_groups,
        "intermediate_size": config.ffn_size,
        "attention_multiplier": config.attention_multiplier or config.head_dim**-0.5,
    }


GRANITE = ConfigMap(
    architecture="granite",
    fields=(
        *decoder_fields(tied=False, positions=2048),
        Field("num_key_value_heads", "num_query_groups"),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "attention_bias", default=False),
        Field("mlp_bias", "mlp_bias", default=False),
        *FACTORS,
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored=IGNORED,
    import_extra=import_rope,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="granite",
    model_types={"granite": GRANITE},
    name_map=name_map,
    copies=tied_output,
    architectures={"granite": "GraniteForCausalLM"},
)
