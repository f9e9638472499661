"""Qwen2 and Qwen3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    SLIDING,
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
from mt_models.qwen.config import QwenConfig

WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def name_map(config: QwenConfig) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *(norm_rules(QK_NORMS) if config.qk_layernorm else ()),
        *attention_rules(config, qkv_bias=config.add_qkv_bias),
        *feed_forward_rules(),
    ]
    return decoder_name_map(config, layer)


def model_type_of(config: QwenConfig) -> str:
    if config.add_qkv_bias == config.qk_layernorm:
        raise ConfigError(
            f"model.add_qkv_bias={config.add_qkv_bias} with model.qk_layernorm={config.qk_layernorm} cannot be written "
            "for Hugging Face: qwen2 has the biases alone, qwen3 the norms alone"
        )
    return "qwen2" if config.add_qkv_bias else "qwen3"


def import_windows(external: Mapping[str, Any]) -> dict[str, Any]:
    layers = external.get("num_hidden_layers", 32)
    window = external.get("sliding_window", 4096) if external.get("use_sliding_window") else None
    # Above the number of layers it means that none has a window.
    first = min(external.get("max_window_layers", 28), layers)
    values = {"sliding_window": window, "max_window_layers": first} if window is not None and first < layers else {}
    # Newer files list every layer's kind beside the three older keys. Both
    # are the same statement, or the file is wrong.
    expected = [SLIDING if values and layer >= first else FULL for layer in range(layers)]
    layer_types = external.get("layer_types")
    if layer_types is not None and layer_types != expected:
        raise ConfigError(
            f"layer_types={layer_types} is not supported: by use_sliding_window, sliding_window and max_window_layers "
            f"it has to be {expected}"
        )
    return values


def export_windows(config: QwenConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.max_window_layers if config.sliding_window is not None else config.num_layers,
        "layer_types": [FULL if config.window_of(i) is None else SLIDING for i in range(config.num_layers)],
    }


def _map_of(kind: str, *fields: Field, fixed: tuple[Fixed, ...] = (), implied: dict[str, Any]) -> ConfigMap:
    def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
        config = QwenConfig.model_validate(model)
        return {**export_shape(config), **export_rope(config), **export_windows(config)}

    return ConfigMap(
        architecture=kind,
        fields=(*decoder_fields(tied=False, positions=32768), *fields),
        fixed=(Fixed("hidden_act", ("silu", "swish")), Fixed("use_mrope", (False,)), *fixed, *NOT_A_CHOICE),
        ignored=IGNORED,
        import_extra=lambda external: {**implied, **import_rope(external), **import_windows(external)},
        import_extra_keys=(*ROPE_KEYS, *WINDOW_KEYS),
        export_extra=export_extra,
    )


QWEN2 = _map_of(
    "qwen2",
    Field("num_key_value_heads", "num_query_groups", default=32),
    Field("head_dim", "kv_channels"),
    implied={"add_qkv_bias": True, "qk_layernorm": False},
)
QWEN3 = _map_of(
    "qwen3",
    Field("num_key_value_heads", "num_query_groups", default=32),
    Field("head_dim", "kv_channels", default=128),
    fixed=(Fixed("attention_bias", (False,)),),
    implied={"add_qkv_bias": False, "qk_layernorm": True},
)

HUGGING_FACE = HuggingFaceFamily(
    family="qwen",
    model_types={"qwen2": QWEN2, "qwen3": QWEN3},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"},
)
