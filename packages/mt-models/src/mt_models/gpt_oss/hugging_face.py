"""GPT-OSS in Hugging Face's format; the published files are in MXFP4, which a reader dequantizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    SLIDING,
    THEIRS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_scaling,
    export_shape,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import MOE_IGNORED, export_balance, import_balance
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.gpt_oss.config import GptOssConfig
from mt_models.gpt_oss.expert_tensors import (
    InterleavedBias,
    InterleavedMatrices,
    TransposedMatrices,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

MOE_KEYS = ("num_local_experts", "num_experts_per_tok", "experts_per_token", "router_aux_loss_coef")
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The default rope scaling of a configuration without one."""


def name_map(config: GptOssConfig) -> NameMap:
    layer = [
        *norm_rules(PRE_NORMS),
        *attention_rules(config, qkv_bias=True, output_bias=True),
        Same(f"{OURS}self_attention.core_attention.softmax_offset", f"{THEIRS}self_attn.sinks"),
        *expert_rules(),
    ]
    return decoder_name_map(config, layer)


def expert_rules() -> list[Rule]:
    """Rules of a layer: its router and experts."""
    router = [Same(f"{OURS}mlp.router.{kind}", f"{THEIRS}mlp.router.{kind}") for kind in ("weight", "bias")]
    fc1, gate_up = f"{OURS}mlp.experts.linear_fc1", f"{THEIRS}mlp.experts.gate_up_proj"
    fc2, down = f"{OURS}mlp.experts.linear_fc2", f"{THEIRS}mlp.experts.down_proj"
    return [
        *router,
        InterleavedMatrices(f"{fc1}.weight", gate_up),
        InterleavedBias(f"{fc1}.bias", f"{gate_up}_bias"),
        TransposedMatrices(f"{fc2}.weight", down),
        Same(f"{fc2}.bias", f"{down}_bias"),
    ]


# -- configuration -----------------------------------------------------------------------------------


def import_windows(kinds: Sequence[str] | None) -> int | str:
    """window_attn_skip_freq for `layer_types`: a number where one says it, else a pattern."""
    if kinds is None:
        return 2
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ConfigError(
            f"layer_types has {', '.join(unknown)}, which is not supported; it can be {FULL} or {SLIDING}"
        )
    layers = [kind == SLIDING for kind in kinds]
    # 1: no layer has a window; len + 1: all of them have. Otherwise a period, where one fits.
    for every in range(1, len(layers) + 2):
        if layers == [(layer + 1) % every != 0 for layer in range(len(layers))]:
            return every
    return pattern_of(layers)


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    # Without a table the class has YaRN, and with an empty one no scaling.
    named = external.get("rope_parameters") is not None or external.get("rope_scaling")
    positions = external if named else {**external, "rope_parameters": YARN}
    return {
        **import_rope(positions, default_base=150000.0),
        "window_attn_skip_freq": import_windows(external.get("layer_types")),
        "moe": {
            "num_experts": external.get("num_local_experts", 128),
            "moe_router_topk": external.get("num_experts_per_tok", external.get("experts_per_token", 4)),
            **import_balance(external, default=0.001),
        },
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = GptOssConfig.model_validate(model)
    moe = MoEOptions(config)
    moe.require("gpt_oss", moe_ffn_hidden_size=ANY, moe_router_topk=ANY, moe_router_bias=(None, True))
    return {
        **export_shape(config),
        **export_rope(config),
        # A configuration that names no scaling has YaRN there.
        "rope_scaling": export_scaling(config) or {"rope_type": "default"},
        **export_balance(moe),
        "hidden_act": "silu",
        "intermediate_size": moe.ffn_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "layer_types": [SLIDING if window else FULL for window in config.layers_with_window],
    }


GPT_OSS = ConfigMap(
    architecture="gpt_oss",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=131072),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=64),
        Field("sliding_window", "sliding_window", default=128),
    ),
    fixed=(
        Fixed("attention_bias", (True,)),
        Fixed("swiglu_alpha", (1.702,)),
        Fixed("swiglu_limit", (7.0,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "hidden_act": "the class has an activation of its own, whatever the file says",
        "initial_context_length": "rope_scaling.original_max_position_embeddings says the same",
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS, "layer_types", "quantization_config"),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="gpt_oss",
    model_types={"gpt_oss": GPT_OSS},
    name_map=name_map,
    copies=tied_output,
    architectures={"gpt_oss": "GptOssForCausalLM"},
)
