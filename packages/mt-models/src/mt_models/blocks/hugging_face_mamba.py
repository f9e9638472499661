"""Names and fields that models with Mamba-2 mixers share in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import Field
from mt_core.errors import ConfigError
from mt_core.name_map import Rule, Same
from mt_models.blocks.hugging_face_decoder import negated
from mt_models.blocks.mamba_config import MambaLayerConfig

OF_MAMBA1 = "how Mamba-1 draws new weights; it changes nothing that a model computes"
KERNELS = "which kernel computes the same"


def mixer_rules(config: MambaLayerConfig, ours: str, theirs: str) -> list[Rule]:
    """Rules of a mixer with the prefix `ours` (with its dot) here and `theirs` in Hugging Face's format."""
    names = ["in_proj.weight", "conv1d.weight", "A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"]
    if config.mamba_conv_bias:
        names.append("conv1d.bias")
    if config.mamba_proj_bias:
        names += ["in_proj.bias", "out_proj.bias"]
    # The same names and layouts: Megatron's in_proj rows and Hugging Face's are both those of mamba_ssm.
    return [Same(ours + name, theirs + name) for name in names]


def mamba_decoder_fields(epsilon: float) -> tuple[Field, ...]:
    """Mixers, dropout, norms and embeddings of decoders with Mamba-2 layers. epsilon: the default of their norms."""
    return (
        Field("attention_dropout", "attention_dropout", import_value=lambda rate: float(rate or 0.0), default=0.0),
        Field("mamba_d_state", "mamba_state_dim", default=256),
        Field("mamba_n_groups", "mamba_num_groups", default=1),
        Field("mamba_d_conv", "mamba_conv_kernel", default=4),
        Field("mamba_conv_bias", "mamba_conv_bias", default=True),
        Field("mamba_proj_bias", "mamba_proj_bias", default=False),
        Field("mamba_chunk_size", "mamba_chunk_size", default=256),
        Field("rms_norm_eps", "norm_epsilon", import_value=float, default=epsilon),
        Field("initializer_range", "init_method_std", import_value=float, default=0.02),
        Field("tie_word_embeddings", "untie_embeddings_and_output_weights", negated, negated, default=False),
    )


def time_step_fields(lower: str = "time_step_min") -> tuple[Field, ...]:
    """Range of the initial time steps."""
    return (
        Field(lower, "mamba_dt_min", import_value=float, default=1e-3),
        Field("time_step_max", "mamba_dt_max", import_value=float, default=0.1),
        Field("time_step_floor", "mamba_dt_init_floor", import_value=float, default=1e-4),
    )


def import_limits(limits: Any) -> dict[str, Any]:
    """`time_step_limit` [low, high] -> keys of [model]; an infinite high is no limit."""
    # json has no infinity; json.loads and json.dumps of Python read and write the word Infinity, as transformers does.
    low, high = (float(limit) for limit in limits)
    return {"mamba_dt_lower_limit": low, **({} if high == float("inf") else {"mamba_dt_upper_limit": high})}


def export_limits(config: MambaLayerConfig) -> list[float]:
    high = config.mamba_dt_upper_limit
    return [config.mamba_dt_lower_limit, float("inf") if high is None else high]


def expansion(config: MambaLayerConfig) -> int:
    """`expand`: channels of a mixer for each channel of the residual stream. Raises ConfigError unless it is whole."""
    if config.mamba_inner_size % config.hidden_size:
        raise ConfigError(
            f"model.mamba_num_heads={config.mamba_heads} times model.mamba_head_dim={config.mamba_head_dim} is no "
            f"multiple of model.hidden_size={config.hidden_size}, which a Hugging Face mamba2 (its `expand`) needs"
        )
    return config.mamba_inner_size // config.hidden_size


def require_expansion(external: Mapping[str, Any], *, hidden: int, heads: int, head_dim: int) -> None:
    """Raises ConfigError unless `expand` says the same as heads and head size."""
    expand = external.get("expand", 2)
    if expand * hidden != heads * head_dim:
        raise ConfigError(
            f"expand={expand} times hidden_size={hidden} is {expand * hidden}, but num_heads={heads} times "
            f"head_dim={head_dim} is {heads * head_dim}; the two have to agree"
        )
