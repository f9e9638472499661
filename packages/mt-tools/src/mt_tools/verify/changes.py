"""The differences between a configuration and its small version."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from mt_core.config.fields import Section
from mt_core.config.schema import Config
from mt_tools.verify.small_config import has_global_loss

COMPUTED = ("model", "parallel", "recompute", "precision", "kernels", "optimizer", "train")
"""Sections that define what is computed, and how. The others are replaced."""
MISSING = object()


def changed_keys(config: Config, small: Config) -> dict[str, list[str]]:
    """Section -> "key before -> after" for each of its keys with another value, keys of tables as table.key.

    Keys that were not set are left out: a changed default says nothing about the configuration.
    """
    changed = {name: _changed(config.named(name), small.named(name)) for name in COMPUTED}
    return {name: changes for name, changes in changed.items() if changes}


def describe_changes(config: Config, small: Config, *, width: int = 120) -> str:
    """A paragraph for each section that differs; lines of at most `width` characters where keys allow it."""
    lines = [f"{section}: {', '.join(changes)}" for section, changes in changed_keys(config, small).items()]
    return "\n".join(
        textwrap.fill(
            line, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    )


def unseen(config: Config, small: Config) -> list[str]:
    """Features of the configuration that the small run does without, so that their errors cannot show."""
    model, reduced = config.model.model_dump(), small.model.model_dump()
    precision, dtype = config.precision, small.precision.dtype
    features = {
        f"arithmetic in {precision.dtype}: --dtype {precision.dtype} of mt verify layout runs in it": (
            precision.dtype != dtype
        ),
        "products in FP8": precision.fp8_format != small.precision.fp8_format,
        "global_aux_loss, in whose place is aux_loss": has_global_loss(model) and not has_global_loss(reduced),
        "attention dropout, which is drawn for the heads and positions of a rank": any(
            reduced[key] != value for key, value in model.items() if key.endswith("attention_dropout")
        ),
        "compilation, CUDA graphs and GPU kernels": _on_gpu_alone(config),
    }
    return [text for text, hidden in features.items() if hidden]


def _on_gpu_alone(config: Config) -> bool:
    chosen = any(value != "auto" for value in config.kernels.model_dump().values())
    return chosen or config.train.compile != "none" or config.train.cuda_graphs != "none"


def _changed(before: Section, after: Section) -> list[str]:
    defaults = {key: field.get_default(call_default_factory=True) for key, field in type(before).model_fields.items()}
    chosen = {key: value for key, value in before.model_dump().items() if value != defaults[key]}
    return list(_changes(chosen, {key: value for key, value in after.model_dump().items() if key in chosen}))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in {**before, **after}:
        old, new = before.get(key, MISSING), after.get(key, MISSING)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    """The value as written after --set: TOML, with strings unquoted."""
    if value is MISSING:
        return "default"
    return value if isinstance(value, str) else json.dumps(value)
