"""Differences between the checkpoints that versions of Megatron-Core write and expect, in one table.

The values are those of the packages megatron-core 0.8.0 to 0.19.2: of each, the names that its models give their
parameters with Megatron's own layers and with Transformer Engine's, and the keys of their distributed checkpoints.
Writers take the conventions of the version that a conversion is for. A reader needs no version: it takes every one of
these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mt_core.errors import ConfigError

Version = tuple[int, int]
OLDEST: Version = (0, 8)
NEWEST: Version = (0, 19)
HEAD = "HEAD"
FLAG = "--target-megatron-version"
_NUMBER = re.compile(r"(\d+)\.(\d+)(?:\.\w+)?")


@dataclass(frozen=True)
class Conventions:
    """Conventions of one version. `torch`, `torch_dist`: only in checkpoints of that format.

    convolution: torch: what the names of a Mamba mixer's convolution begin with.
    prediction_layer: torch: the layer within a depth of multi-token prediction; torch_dist kept the older name.
    latent_norms_fused: with Transformer Engine, latent attention's norms are part of the linear layers behind them.
    latent_projections_whole: with Transformer Engine, the down projections are replicated on every tensor rank.
    position_table_twice: T5's table of positions is stored under two names.
    output_bias_twice: torch_dist: the same of the bias of T5's output, whose (empty) FP8 states are objects.
    mixer_sections: torch_dist: what a Mamba mixer packs into one matrix is apart, so that it is cut for other ranks.
    pattern_argument, layer_specification: the arguments that say which layers a hybrid model has, and where its module
    is.
    attention_state: torch_dist: with Transformer Engine, an attention has an (empty) FP8 state as its layers have.
    prediction_attention_state: the same of the attention in a depth of multi-token prediction.
    common_file: torch_dist: what is no tensor is in a file instead of the index.
    model_shaped_optimizer: torch_dist: the distributed optimizer's state is in tensors of the shape of the parameters,
    or in whole buckets; older versions flattened parts of parameters.
    """

    version: Version
    convolution: str
    prediction_layer: str
    latent_norms_fused: bool
    latent_projections_whole: bool
    position_table_twice: bool
    output_bias_twice: bool
    mixer_sections: bool
    pattern_argument: str
    layer_specification: tuple[str, str]
    attention_state: bool
    prediction_attention_state: bool
    common_file: bool
    model_shaped_optimizer: bool


_MAMBA_SPECIFICATION = ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")
_HYBRID_SPECIFICATION = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
DIFFERENCES: Mapping[str, Mapping[Version, Any]] = {
    "convolution": {OLDEST: "conv1d.", (0, 19): "conv1d_"},
    "prediction_layer": {OLDEST: "transformer_layer", (0, 17): "mtp_model_layer"},
    "latent_norms_fused": {OLDEST: False, (0, 11): True},
    "latent_projections_whole": {OLDEST: False, (0, 14): True},
    "position_table_twice": {OLDEST: False, (0, 9): True},
    "output_bias_twice": {OLDEST: False, (0, 9): True},
    "mixer_sections": {OLDEST: False, (0, 9): True},
    "pattern_argument": {OLDEST: "hybrid_override_pattern", (0, 17): "hybrid_layer_pattern"},
    "layer_specification": {OLDEST: _MAMBA_SPECIFICATION, (0, 18): _HYBRID_SPECIFICATION},
    "attention_state": {OLDEST: True, (0, 15): False},
    "prediction_attention_state": {OLDEST: True, (0, 17): False},
    "common_file": {OLDEST: True, (0, 19): False},
    "model_shaped_optimizer": {OLDEST: False, (0, 15): True},
}
"""Field of `Conventions` -> the first version that has a value -> the value."""


def _derived_heads(args: Mapping[str, Any]) -> int:
    """The heads of a mixer, where there is no argument for them: twice the hidden size over the head size."""
    return 2 * int(args["hidden_size"]) // int(args["mamba_head_dim"])


def _dense_width(args: Mapping[str, Any]) -> int:
    """The width of an expert, where there is no argument for it."""
    return int(args["ffn_hidden_size"])


FIRST_VERSIONS: Mapping[Version, Mapping[str, Any]] = {
    (0, 10): {
        "multi_latent_attention": False,
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": _dense_width,
        "moe_shared_expert_intermediate_size": None,
        "use_rope_scaling": False,
    },
    (0, 11): {
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    },
    (0, 12): {
        "mtp_num_layers": None,
        "moe_router_dtype": None,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
    },
    (0, 13): {"mamba_num_heads": _derived_heads},
    (0, 15): {
        "softmax_type": "vanilla",
        "window_attn_skip_freq": None,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
    },
    (0, 16): {"moe_latent_size": None, "moe_shared_expert_gate": False},
    (0, 18): {"enable_mhc_connections": False},
}
"""First version -> the arguments of a model that it added -> what versions before it compute (or makes that)."""
FIRST_POSITIONS: Mapping[str, Version] = {"yarn": (0, 15), "relative": (0, 11)}
"""The same of values of position_embedding_type."""
FIRST_LAYERS: Mapping[str, Version] = {"E": (0, 16)}
"""The same of symbols in the pattern of a hybrid model."""


def parse_version(text: str | None) -> Version:
    """0.12, 0.12.2, or HEAD, the newest; None: the newest. Raises ConfigError for anything else."""
    if text is None or text.upper() == HEAD:
        return NEWEST
    match = _NUMBER.fullmatch(text)
    version = (int(match[1]), int(match[2])) if match else None
    if version is None or not OLDEST <= version <= NEWEST:
        raise ConfigError(
            f"{FLAG} {text}: checkpoints of Megatron-Core {shown(OLDEST)} to {shown(NEWEST)} are known; it can be one "
            f"of these, such as 0.12 or 0.12.2, or {HEAD} for the newest"
        )
    return version


def shown(version: Version) -> str:
    return ".".join(map(str, version))


@cache
def conventions(version: Version) -> Conventions:
    """The row of the table for a version that `parse_version` gave."""
    # The last row that is not newer than the version; rows are in order.
    values = {
        field: next(value for first, value in reversed(list(rows.items())) if first <= version)
        for field, rows in DIFFERENCES.items()
    }
    return Conventions(version, **values)


def all_conventions() -> Iterator[Conventions]:
    """The conventions of all versions, the newest first."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        yield conventions((NEWEST[0], minor))


def require_known(args: Mapping[str, Any], version: Version) -> None:
    """Raises ConfigError, naming the argument, for a model that a version cannot have. args: Megatron's."""
    for first, arguments in FIRST_VERSIONS.items():
        for name, before in arguments.items() if version < first else ():
            _require(args, version, first, name, before)
    _require_symbol(version, FIRST_POSITIONS, "position_embedding_type", [args.get("position_embedding_type")])
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        _require_symbol(version, FIRST_LAYERS, name, args.get(name) or "")


def _require(args: Mapping[str, Any], version: Version, first: Version, name: str, before: Any) -> None:
    hybrid = bool(args.get("is_hybrid_model", False))
    # Arguments of mixers are written for every model; of others they mean nothing.
    if name not in args or (name.startswith("mamba_") and not hybrid):
        return
    meant = before(args) if callable(before) else before
    # None: the argument was not given, whatever the version.
    if args[name] not in (None, meant):
        raise _too_old(version, first, f"{name}={args[name]}")


def _require_symbol(version: Version, known: Mapping[str, Version], name: str, values: Any) -> None:
    for value in values:
        if version < (first := known.get(value, OLDEST)):
            raise _too_old(version, first, f"{name} {value!r}")


def _too_old(version: Version, first: Version, what: str) -> ConfigError:
    return ConfigError(
        f"{FLAG} {shown(version)}: the model needs {what}, which Megatron-Core has since {shown(first)}; choose that "
        "version or a newer one"
    )
