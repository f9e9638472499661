"""Falcon-H1 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    POSITIONS,
    ROPE_KEYS,
    THEIRS,
    attention_rules,
    import_rope,
    longest_sequence,
    norm_rules,
)
from mt_models.blocks.hugging_face_mamba import (
    KERNELS,
    OF_MAMBA1,
    export_limits,
    import_limits,
    mamba_decoder_fields,
    mixer_rules,
)
from mt_models.blocks.hugging_face_moe import SILU
from mt_models.falcon_h1.config import FalconH1Config
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, OF_GENERATION, HuggingFaceFamily, require_value, tied_output

KIND = "falcon_h1"
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_ff_layernorm"}


def name_map(config: FalconH1Config) -> NameMap:
    halves = (f"{THEIRS}feed_forward.gate_proj.weight", f"{THEIRS}feed_forward.up_proj.weight")
    mixer = mixer_rules(config, f"{OURS}mixer.", f"{THEIRS}mamba.")
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *norm_rules(NORMS),
        *(rule for rule in mixer if config.mamba_gated_norm or not rule.ours.endswith(".norm.weight")),
        *attention_rules(config),
        Concatenate(f"{OURS}mlp.linear_fc1.weight", halves),
        Same(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}feed_forward.down_proj.weight"),
        Same("decoder.final_layernorm.weight", "model.final_layernorm.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


# -- configuration -----------------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = external.get("hidden_size", 4096), external.get("mamba_n_heads", 128)
    inner = external.get("mamba_d_ssm", 1024)
    inner = external.get("mamba_expand", 2) * hidden if inner is None else inner
    size = external.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else size
    if size * heads != inner:
        raise ConfigError(f"mamba_n_heads={heads} times mamba_d_head={size} is not mamba_d_ssm={inner}")
    rope = import_rope(external)
    if "rope_scaling_type" in rope:
        raise ConfigError(
            f"rope_parameters or rope_scaling of type {rope['rope_scaling_type']} is not supported in a {KIND}; it can "
            "be null or default"
        )
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "rotary_base": rope["rotary_base"],
        "mamba_gated_norm": _gated_norm(external),
        "mamba_proj_bias": _projection_bias(external),
        "ssm_multipliers": [float(x) for x in external.get("ssm_multipliers") or [1.0] * 5],
        "mlp_multipliers": [float(x) for x in external.get("mlp_multipliers") or [1.0] * 2],
        **longest_sequence(external),
        **import_limits(external.get("time_step_limit") or (0.0, float("inf"))),
    }


def _gated_norm(external: Mapping[str, Any]) -> bool:
    gated = bool(external.get("mamba_rms_norm", False))
    # Where the norm is before the gate, the kernels that the class trains with still have it behind.
    if gated and external.get("mamba_norm_before_gate", True):
        raise ConfigError("mamba_norm_before_gate=True is not supported with mamba_rms_norm=True; it can be False")
    return gated


def _projection_bias(external: Mapping[str, Any]) -> bool:
    into, out = (bool(external.get(key, False)) for key in ("mamba_proj_bias", "projectors_bias"))
    if into != out:
        raise ConfigError(f"mamba_proj_bias={into} and projectors_bias={out} are not supported; they have to be equal")
    return into


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = FalconH1Config.model_validate(model)
    require_value(config, "fp32_residual_connection", (False,), KIND)
    return {
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "rope_theta": config.rotary_base,
        "mamba_d_ssm": config.mamba_inner_size,
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_rms_norm": config.mamba_gated_norm,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": config.mamba_proj_bias,
        "projectors_bias": config.mamba_proj_bias,
        "ssm_multipliers": config.ssm_multipliers,
        "mlp_multipliers": config.mlp_multipliers,
        "time_step_limit": export_limits(config),
        **longest_sequence(model),
    }


FACTORS = (
    "embedding_multiplier", "lm_head_multiplier", "attention_in_multiplier", "attention_out_multiplier",
    "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
FALCON_H1 = ConfigMap(
    architecture=KIND,
    fields=(
        Field("vocab_size", "vocab_size", default=128000),
        Field("hidden_size", "hidden_size", default=4096),
        Field("intermediate_size", "ffn_hidden_size", default=14336),
        Field("num_hidden_layers", "num_layers", default=32),
        Field("num_attention_heads", "num_attention_heads", default=32),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels"),
        *(Field(name, name, import_value=float, default=1.0) for name in FACTORS),
        *(entry for entry in mamba_decoder_fields(epsilon=1e-5) if entry.theirs != "mamba_proj_bias"),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        Fixed("mlp_bias", (False,)),
        Fixed("mamba_use_mlp", (True,), written=False),
        Fixed("attn_layer_indices", (None,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "mamba_expand": "mamba_d_ssm says it, where it is set",
        "mlp_expansion_factor": "intermediate_size says it",
        "layer_types": "every layer is hybrid",
        "layers_block_type": "every layer is hybrid",
        "num_logits_to_keep": OF_GENERATION,
        "use_mamba_kernels": KERNELS,
        **dict.fromkeys(("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"), OF_MAMBA1),
    },
    import_extra=import_extra,
    import_extra_keys=(
        *ROPE_KEYS, POSITIONS, "mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_rms_norm",
        "mamba_norm_before_gate", "mamba_proj_bias", "projectors_bias", "ssm_multipliers", "mlp_multipliers",
        "time_step_limit",
    ),
    export_extra=export_extra,
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: FALCON_H1},
    name_map=name_map,
    copies=tied_output,
    architectures={KIND: "FalconH1ForCausalLM"},
)
