"""Dense ERNIE 4.5 models in Hugging Face's format."""

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
from mt_models.ernie4_5.config import Ernie45Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output

DROPOUT = "attention_dropout"


def name_map(config: Ernie45Config) -> NameMap:
    bias = config.use_bias
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *feed_forward_rules(bias=bias),
    ]
    return decoder_name_map(config, layer)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return import_rope(external, default_base=500000.0)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Ernie45Config.model_validate(model)
    require_value(config, "attention_dropout", (0.0,), "ernie4_5")
    return {**export_shape(config), **export_rope(config)}


ERNIE45 = ConfigMap(
    architecture="ernie4_5",
    fields=(
        *(field for field in decoder_fields(tied=True, epsilon=1e-5, positions=131072) if field.theirs != DROPOUT),
        Field("num_key_value_heads", "num_query_groups", default=2),
        Field("head_dim", "kv_channels", default=128),
        Field("use_bias", "use_bias", bool, default=False),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored={**IGNORED, DROPOUT: "the class sets it to 0"},
    import_extra=import_extra,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="ernie4_5",
    model_types={"ernie4_5": ERNIE45},
    name_map=name_map,
    copies=tied_output,
    architectures={"ernie4_5": "Ernie4_5ForCausalLM"},
)
