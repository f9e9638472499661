"""Mamba-2 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Same
from mt_models.blocks.hugging_face_decoder import negated
from mt_models.blocks.hugging_face_mamba import (
    OF_MAMBA1,
    expansion,
    export_limits,
    import_limits,
    mixer_rules,
    require_expansion,
    time_step_fields,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily
from mt_models.mamba.config import MambaConfig

LAYER = "backbone.layers.{i}."


def name_map(config: MambaConfig) -> NameMap:
    rules = [
        Same("embedding.word_embeddings.weight", "backbone.embeddings.weight"),
        Same("decoder.layers.{i}.norm.weight", f"{LAYER}norm.weight"),
        *mixer_rules(config, "decoder.layers.{i}.mixer.", f"{LAYER}mixer."),
        Same("decoder.final_layernorm.weight", "backbone.norm_f.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    return NameMap(rules, config.num_layers)


def copies(config: MambaConfig) -> Mapping[str, str]:
    tied = not config.untie_embeddings_and_output_weights
    return {"lm_head.weight": "backbone.embeddings.weight"} if tied else {}


def spelling(config: MambaConfig, name: str) -> str:
    """The first checkpoints have `embedding` in the singular."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads, head_dim = (
        external.get(key, default) for key, default in (("hidden_size", 4096), ("num_heads", 128), ("head_dim", 64))
    )
    # Three keys give one width; the class multiplies two of them, and a third that differs would be silently wrong.
    require_expansion(external, hidden=hidden, heads=heads, head_dim=head_dim)
    inner = external.get("intermediate_size", heads * head_dim)
    if inner != heads * head_dim:
        raise ConfigError(f"intermediate_size={inner} is not num_heads={heads} times head_dim={head_dim}; remove it")
    limits = import_limits(external.get("time_step_limit", (0.0, float("inf"))))
    return {**limits, "use_scaled_init_method": False}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MambaConfig.model_validate(model)
    return {
        "expand": expansion(config),
        "num_heads": config.mamba_heads,
        "time_step_limit": export_limits(config),
    }


MAMBA2 = ConfigMap(
    architecture="mamba2",
    fields=(
        Field("vocab_size", "vocab_size", default=32768),
        Field("num_hidden_layers", "num_layers", default=64),
        Field("hidden_size", "hidden_size", default=4096),
        Field("num_heads", "mamba_num_heads", default=128),
        Field("head_dim", "mamba_head_dim", default=64),
        Field("state_size", "mamba_state_dim", default=128),
        Field("n_groups", "mamba_num_groups", default=8),
        Field("conv_kernel", "mamba_conv_kernel", default=4),
        Field("use_conv_bias", "mamba_conv_bias", default=True),
        Field("use_bias", "mamba_proj_bias", default=False),
        Field("chunk_size", "mamba_chunk_size", default=256),
        Field("layer_norm_epsilon", "norm_epsilon", import_value=float, default=1e-5),
        Field("initializer_range", "init_method_std", import_value=float, default=0.1),
        Field("residual_in_fp32", "fp32_residual_connection", default=True),
        Field("tie_word_embeddings", "untie_embeddings_and_output_weights", negated, negated, default=False),
        *time_step_fields(),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("rms_norm", (True,)),
        # Where it is true, transformers divides the weights that it loads, and not new ones alone.
        Fixed("rescale_prenorm_residual", (False,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "norm_before_gate": "the class gates before the norm, whatever the file says",
        **dict.fromkeys(("time_step_rank", "time_step_scale", "time_step_init_scheme"), OF_MAMBA1),
    },
    import_extra=import_extra,
    import_extra_keys=("time_step_limit", "expand", "intermediate_size"),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="mamba",
    model_types={"mamba2": MAMBA2},
    name_map=name_map,
    copies=copies,
    spelling=spelling,
    architectures={"mamba2": "Mamba2ForCausalLM"},
)
