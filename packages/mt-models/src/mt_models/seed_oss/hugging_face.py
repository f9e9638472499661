"""Seed-OSS in Hugging Face's format."""

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
from mt_models.seed_oss.config import SeedOssConfig


def name_map(config: SeedOssConfig) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=config.attention_bias, output_bias=config.attention_out_bias),
        *feed_forward_rules(bias=config.mlp_bias),
    ]
    return decoder_name_map(config, layer)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = SeedOssConfig.model_validate(model)
    return {**export_shape(config), **export_rope(config), "attention_dropout": config.attention_dropout}


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    dropout = float(external.get("attention_dropout", 0.1) or 0.0)
    return {**import_rope(external), "attention_dropout": dropout}


SEED_OSS = ConfigMap(
    architecture="seed_oss",
    fields=(
        *decoder_fields(tied=False, positions=524288),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=128),
        Field("attention_bias", "attention_bias", default=True),
        Field("attention_out_bias", "attention_out_bias", default=False),
        Field("mlp_bias", "mlp_bias", default=False),
        Field("residual_dropout", "residual_dropout", float, default=0.1),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored=IGNORED,
    import_extra=import_extra,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="seed_oss",
    model_types={"seed_oss": SEED_OSS},
    name_map=name_map,
    copies=tied_output,
    architectures={"seed_oss": "SeedOssForCausalLM"},
)
