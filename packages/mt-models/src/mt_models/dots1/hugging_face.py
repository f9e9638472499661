"""dots.llm1 and Solar Open in Hugging Face's format, which differ by the norms of heads and by dense layers."""

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
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope,
    norm_rules,
    require_full_attention,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    mixed_feed_forward_rules,
    require_normalized,
)
from mt_models.blocks.moe import MoEOptions
from mt_models.dots1.config import Dots1Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.qwen_moe.glm4_moe import export_moe, import_moe

DOTS, SOLAR = "dots1", "solar_open"
WINDOW, WINDOWS_FROM, KINDS = "sliding_window", "max_window_layers", "layer_types"
DENSE_LAYERS = "first_k_dense_replace"


def name_map(config: Dots1Config) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *(norm_rules(QK_NORMS) if config.qk_layernorm else ()),
        *attention_rules(config),
        *mixed_feed_forward_rules(config, ExpertNames(), always_biased=True),
    ]
    return decoder_name_map(config, layer)


def model_type_of(config: Dots1Config) -> str:
    return DOTS if config.qk_layernorm else SOLAR


# -- configuration -----------------------------------------------------------------------------------

DOTS_DEFAULTS = {"num_hidden_layers": 62, "moe_intermediate_size": 1408, DENSE_LAYERS: 0, "norm_topk_prob": False}
SOLAR_DEFAULTS = {"num_hidden_layers": 48, "moe_intermediate_size": 1280, "n_routed_experts": 128}
SOLAR_DEFAULTS |= {"num_experts_per_tok": 8}


def import_dots(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**DOTS_DEFAULTS, **external}
    require_normalized(stated)
    require_no_windows(stated)
    return {**import_rope(external), "qk_layernorm": True, "moe": import_moe(stated)}


def require_no_windows(external: Mapping[str, Any]) -> None:
    """Raises ConfigError for layers with a window: those from max_window_layers on, unless a list says the kinds."""
    if external.get(KINDS) is not None:
        require_full_attention(external)
    elif external.get(WINDOW, 4096) is not None and external.get(WINDOWS_FROM, 62) < external["num_hidden_layers"]:
        raise ConfigError(
            f"{WINDOWS_FROM}={external.get(WINDOWS_FROM, 62)} with {WINDOW}={external.get(WINDOW, 4096)} is not "
            f"supported; {WINDOW} can be None, or {WINDOWS_FROM} num_hidden_layers={external['num_hidden_layers']}"
        )


def import_solar(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**SOLAR_DEFAULTS, **external, DENSE_LAYERS: 0}
    require_normalized(stated)
    return {**import_rope(external, 1000000.0), "qk_layernorm": False, "moe": import_moe(stated)}


def export_dots(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Dots1Config.model_validate(model)
    layers = {WINDOW: None, KINDS: [FULL] * config.num_layers}
    return {**export_shape(config), **export_rope(config), **export_moe(config, DOTS), **layers}


def export_solar(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Dots1Config.model_validate(model)
    values = {**export_shape(config), **export_rope(config), **export_moe(config, SOLAR)}
    if values.pop(DENSE_LAYERS):
        raise ConfigError(
            f"model.moe.moe_layer_freq={MoEOptions(config)['moe_layer_freq']} cannot be written as a Hugging Face "
            f"{SOLAR}, which has no dense layers"
        )
    return values


MOE_KEYS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor", BIAS_KEY,
)  # fmt: skip
FIXED = (
    SILU,
    Fixed("attention_bias", (False,)),
    Fixed("scoring_func", ("sigmoid",), written=False),
    Fixed("topk_method", ("noaux_tc",), written=False),
    Fixed("moe_layer_freq", (1,), written=False),
    *NOT_A_CHOICE,
)
NOT_READ = {
    **IGNORED,
    **MOE_IGNORED,
    **dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size"), "of the code that trained the model"),
}
SPELLINGS = {"num_local_experts": "n_routed_experts"}
DOTS1 = ConfigMap(
    architecture=DOTS,
    fields=(
        *decoder_fields(tied=False, positions=2048),
        Field("num_key_value_heads", "num_query_groups", default=32),
        Field("head_dim", "kv_channels"),
    ),
    fixed=FIXED,
    ignored=NOT_READ,
    import_extra=import_dots,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, DENSE_LAYERS, WINDOW, WINDOWS_FROM, KINDS),
    export_extra=export_dots,
    spellings=SPELLINGS,
)
SOLAR_OPEN = ConfigMap(
    architecture=SOLAR,
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=131072),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=128),
    ),
    fixed=(
        *FIXED,
        Fixed(DENSE_LAYERS, (0,), written=False),
        Fixed("partial_rotary_factor", (1.0,), written=False),
        Fixed("use_qk_norm", (False,), written=False),
    ),
    ignored=NOT_READ,
    import_extra=import_solar,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS),
    export_extra=export_solar,
    spellings=SPELLINGS,
)

HUGGING_FACE = HuggingFaceFamily(
    family="dots1",
    model_types={DOTS: DOTS1, SOLAR: SOLAR_OPEN},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    architectures={DOTS: "Dots1ForCausalLM", SOLAR: "SolarOpenForCausalLM"},
)
