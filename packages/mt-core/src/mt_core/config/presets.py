"""Presets: partial configurations that model families bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mt_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from mt_core.plugins import Plugin, PluginHost

NO_PRESETS: Mapping[str, Any] = {}
"""Presets of a family whose models are given by programs."""


@dataclass(frozen=True)
class Preset:
    """A partial config tree, and the family and plugin that bring it."""

    family: str
    plugin: Plugin
    values: Mapping[str, Mapping[str, Any]]


def installed_presets(host: PluginHost) -> tuple[dict[str, list[Preset]], list[str]]:
    """Preset name -> its presets (more than one is a conflict); and why some plugin's could not be read."""
    found: dict[str, list[Preset]] = {}
    problems = []
    for registration in host.models.registrations:
        family, plugin = registration.spec.name, registration.plugin
        try:
            trees = registration.spec.presets.load()
        except Exception as error:  # another's code may raise anything, and must stop nobody else
            problems.append(f"{plugin.label} cannot give its presets: {type(error).__name__}: {error}")
            continue
        for name, tree in trees.items():
            found.setdefault(name, []).append(Preset(family, plugin, tree))
    return found, problems


def find_preset(name: str, host: PluginHost) -> Mapping[str, Mapping[str, Any]]:
    """The partial config tree registered as preset `name` by a model family."""
    presets, problems = installed_presets(host)
    if name not in presets:
        because = "".join(f"; {problem}" for problem in problems)
        if not presets:
            raise ConfigError(f"preset {name}: no installed plugin brings a preset (pip install mt-models){because}")
        near = did_you_mean(name, presets)
        raise ConfigError(f"preset {name} is unknown{near}; `mt models` lists the {len(presets)} presets{because}")
    first, *others = presets[name]
    if others:
        owners = " and ".join(f"{preset.plugin.label} for family {preset.family}" for preset in presets[name])
        raise ConfigError(f"preset {name} is brought by {owners}; keep one of them with MT_PLUGINS")
    return {**first.values, "model": {"family": first.family, **first.values.get("model", {})}}
