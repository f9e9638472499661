"""EXAONE 4 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap
from mt_models.blocks.hugging_face_decoder import (
    BRANCH_NORMS,
    FULL,
    QK_NORMS,
    ROPE_KEYS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    feed_forward_rules,
    import_pattern,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.exaone4.config import Exaone4Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

PATTERN = "sliding_window_pattern"


def name_map(config: Exaone4Config) -> NameMap:
    layer = [
        *norm_rules(BRANCH_NORMS),
        *norm_rules(QK_NORMS),
        *attention_rules(config),
        *feed_forward_rules(),
    ]
    return decoder_name_map(config, layer)


def import_windows(external: Mapping[str, Any]) -> dict[str, Any]:
    """The window and every how many layers there is none, from the list of kinds, a number or a pattern "LLLG"."""
    kinds, layers = external.get("layer_types"), external.get("num_hidden_layers", 32)
    window = external.get("sliding_window", 4096)
    if kinds is not None and len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries; it needs one for each of num_hidden_layers={layers}")
    if window is None:
        if set(kinds or ()) - {FULL}:
            raise ConfigError(f"layer_types={kinds} is not supported with sliding_window=None; all can be {FULL}")
        return {}
    if kinds is not None:
        return {"sliding_window": window, PATTERN: import_pattern({"layer_types": kinds}, 4)}
    period = external.get(PATTERN, 4)
    if isinstance(period, str):
        period = _period(period)
    if not period:
        raise ConfigError(f"{PATTERN}={period!r} is not supported with sliding_window={window}; it can be 1 or more")
    return {"sliding_window": window, PATTERN: period}


def _period(pattern: str) -> int:
    """The length of a pattern of local layers and a global one at its end."""
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise ConfigError(f"{PATTERN}={pattern!r} is not supported; it can be L for local layers, then one G")
    return len(pattern)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    return {**import_rope(external), **import_windows(external)}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Exaone4Config.model_validate(model)
    pattern = {} if config.sliding_window is None else {PATTERN: config.sliding_window_pattern}
    return {
        **export_shape(config),
        **export_rope(config),
        **pattern,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


EXAONE4 = ConfigMap(
    architecture="exaone4",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=2048),
        Field("num_key_value_heads", "num_query_groups", default=32),
        Field("head_dim", "kv_channels"),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored={**IGNORED, "layer_norm_epsilon": "of EXAONE 3; rms_norm_eps is what counts"},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, "layer_types", "sliding_window", PATTERN),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="exaone4",
    model_types={"exaone4": EXAONE4},
    name_map=name_map,
    copies=tied_output,
    architectures={"exaone4": "Exaone4ForCausalLM"},
)
