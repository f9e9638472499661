"""SmolLM3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
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
    layer_types,
    norm_rules,
    require_full_attention,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.smollm3.config import SmolLM3Config

LIST, INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def name_map(config: SmolLM3Config) -> NameMap:
    bias = config.attention_bias
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=bias, output_bias=bias),
        *feed_forward_rules(bias=config.mlp_bias),
    ]
    return decoder_name_map(config, layer)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    require_full_attention(external)
    return {**import_rope(external, 2000000.0), "no_rope_freq": import_no_rope(external)}


def import_no_rope(external: Mapping[str, Any]) -> int | str:
    """Layers without positions from the list, which has a 0 for each, or from the interval."""
    rotates, interval = external.get(LIST), external.get(INTERVAL, 4)
    layers = external.get("num_hidden_layers", 36)
    if rotates is None:
        return int(interval)
    if len(rotates) < layers or set(rotates) - {0, 1}:
        raise ConfigError(f"{LIST}={rotates} is not supported; it needs 0 or 1 for each of num_hidden_layers={layers}")
    without = [not rotated for rotated in rotates[:layers]]
    by_interval = [interval > 0 and (layer + 1) % interval == 0 for layer in range(layers)]
    return int(interval) if without == by_interval else pattern_of(without)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = SmolLM3Config.model_validate(model)
    interval = {INTERVAL: config.no_rope_freq} if isinstance(config.no_rope_freq, int) else {}
    return {
        **export_shape(config),
        **export_rope(config),
        **interval,
        LIST: [int(config.rotates(layer)) for layer in range(config.num_layers)],
        "layer_types": layer_types(config),
    }


SMOLLM3 = ConfigMap(
    architecture="smollm3",
    fields=(
        *decoder_fields(tied=True, positions=32768),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels"),
        Field("attention_bias", "attention_bias", default=False),
        Field("mlp_bias", "mlp_bias", default=False),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("use_sliding_window", (False,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "max_window_layers": "the class does not read it",
        "sliding_window": "of use_sliding_window, which is false",
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, LIST, INTERVAL, "layer_types"),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="smollm3",
    model_types={"smollm3": SMOLLM3},
    name_map=name_map,
    copies=tied_output,
    architectures={"smollm3": "SmolLM3ForCausalLM"},
)
