"""Layers of a configuration: values from one place each, merged key by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.config.fields import Section
from mt_core.config.messages import unknown_section
from mt_core.errors import ConfigError, Problems

DEFAULT = "default"
Merged = Mapping[str, Mapping[str, tuple[Any, str]]]
"""section -> key -> (value, origin)."""


@dataclass(frozen=True)
class Layer:
    """Values from one place; `origin` is how that place is shown, for instance "file run.toml"."""

    origin: str
    values: Mapping[str, Mapping[str, Any]]

    @property
    def is_preset(self) -> bool:
        return self.origin.startswith("preset ")

    @property
    def is_background(self) -> bool:
        """Brought by a preset or a checkpoint, rather than written for this run."""
        return self.origin.startswith(("preset ", "checkpoint "))


def merge_layers(
    layers: Iterable[Layer], problems: Problems | None = None, sections: Mapping[str, type[Section]] | None = None
) -> Merged:
    """section -> key -> (value, origin), later layers winning.

    A section that is no table, or none of `sections` where they are given, is a ConfigError: collected in `problems`,
    or raised without it.
    """
    merged: dict[str, dict[str, tuple[Any, str]]] = {}
    collected = problems or Problems()
    for layer in layers:
        for section, values in layer.values.items():
            with collected.collect():
                if sections is not None and section not in sections:
                    raise ConfigError(unknown_section(section, layer.origin, sections))
                _require_table(section, values, layer.origin)
                merged.setdefault(section, {}).update({key: (value, layer.origin) for key, value in values.items()})
    if problems is None:
        collected.stop_if_any()
    return merged


def _require_table(section: str, values: object, origin: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section} (from {origin}): got {values!r}, expected a table of keys")
