"""The pattern of layer kinds, in Megatron's notation: `M-M-*-|M-M-*-`.

A symbol is a layer; `|` begins a new pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.errors import ConfigError

MAMBA, ATTENTION, FEED_FORWARD, EXPERTS, STAGE = "M", "*", "-", "E", "|"

KINDS: Mapping[str, str] = {
    MAMBA: "Mamba-2",
    ATTENTION: "attention",
    FEED_FORWARD: "feed-forward",
    EXPERTS: "mixture of experts",
}
MEGATRON_ONLY: Mapping[str, str] = {
    "G": "gated delta net",
    "D": "DeepSeek sparse attention",
    "+": "multi-head latent attention",
    "/": "multi-token prediction",
}
"""Symbols of Megatron that are not supported here."""


def layers_of(pattern: str) -> str:
    """The symbols of the layers, without stage boundaries."""
    return pattern.replace(STAGE, "")


def stages_of(pattern: str) -> list[int]:
    """How many layers stand in each part between `|`."""
    return [len(part) for part in pattern.split(STAGE)]


def check_pattern(pattern: str) -> None:
    """Raise ConfigError for an unknown symbol, or a part without layers."""
    known = ", ".join(f"{symbol} ({kind})" for symbol, kind in KINDS.items())
    # Symbols that Megatron has and this family does not are named by their meaning, so that the
    # reader of a Megatron launch script sees what is missing.
    for place, symbol in enumerate(layers_of(pattern)):
        if symbol not in KINDS:
            meaning = f" ({MEGATRON_ONLY[symbol]})" if symbol in MEGATRON_ONLY else ""
            raise ConfigError(
                f"model.hybrid_layer_pattern={pattern!r} has {symbol!r}{meaning} as layer {place}; a layer can be "
                f"{known}, and {STAGE} begins a pipeline stage"
            )
    if 0 in stages_of(pattern):
        raise ConfigError(
            f"model.hybrid_layer_pattern={pattern!r} has a stage without layers; there is at least one symbol of "
            f"{', '.join(KINDS)} before, between and after {STAGE}"
        )
