"""Megatron's arguments of Llama 4: those of its scripts, in which positions see everything before them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import kind_of_model, need_values, require
from mt_models.blocks.megatron_decoder import rotary_arguments, rotary_decoder_section, rotates_neighbours
from mt_models.llama4.config import Llama4Config

NORM, NO_ROPE = "qk_l2_norm", "no_rope_freq"
FIXED: Mapping[str, tuple[Any, Any]] = {
    "add_bias_linear": (True, False),
    "add_qkv_bias": (False, False),
    "window_size": (None, None),
}
"""Argument -> Megatron's default, and what the family has."""


def is_llama4(args: MegatronArguments, names: Collection[str]) -> bool:
    return kind_of_model(args, names) == "decoder" and rotates_neighbours(args)


def llama4_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    need_values(args, "a decoder with experts and rotated pairs of neighbours", FIXED)
    # Norms without weights take the place of those of qk_layernorm.
    normalized, section = bool(args.get(NORM, False)), rotary_decoder_section(args)
    if args.get("qk_layernorm", False) and not normalized:
        raise ConfigError(
            f"{args.origin}: qk_layernorm=True without {NORM} is not read of a decoder with experts and rotated pairs "
            "of neighbours; it can be False"
        )
    frequency = _no_rope(args, section["num_layers"])
    if normalized and frequency is not None:
        raise ConfigError(
            f"{args.origin}: {NORM}=True with {NO_ROPE}={args.values[NO_ROPE]!r} is not read: norms of queries "
            "and keys in layers without positions; one of both can be set"
        )
    return {
        **section,
        NORM: normalized,
        NO_ROPE: frequency,
        "attention_chunk_size": None,
        "query_scaling_beta": 0.0,
    }


def _no_rope(args: MegatronArguments, num_layers: int) -> int | str | None:
    """A number, a pattern, or the list that a checkpoint has of it. None where all layers rotate."""
    frequency = args.get(NO_ROPE, None)
    layers = list(frequency) if isinstance(frequency, list | tuple) else None
    if layers is not None and len(layers) != num_layers:
        raise ConfigError(f"{args.origin}: {NO_ROPE} has {len(layers)} entries for num_layers={num_layers}")
    return frequency if layers is None else pattern_of(list(map(bool, layers))) if any(layers) else None


def llama4_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    assert isinstance(model, Llama4Config)
    require(model, "attention_chunk_size", (None,))
    require(model, "attention_bias", (False,))
    rotates = [model.rotates(layer) for layer in range(model.num_layers)]
    if not all(rotates):
        require(model, "query_scaling_beta", (0.0,))
        require(model, NORM, (False,))
    return {
        **rotary_arguments(model, parameters, kept),
        "rotary_interleaved": True,
        NORM: model.qk_l2_norm,
        NO_ROPE: None if all(rotates) else [int(not rotated) for rotated in rotates],
    }


MEGATRON = MegatronMap(arguments=llama4_arguments, takes=is_llama4, section=llama4_section, reads=(NORM, NO_ROPE))
