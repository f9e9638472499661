"""Where a configuration's values come from: default < preset < checkpoint < file < `--set`."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.config.checkpoint_layer import with_checkpoint_layer
from mt_core.config.files import TOO_DEEP, read_config_file, require_depth
from mt_core.config.layers import Layer, Merged, merge_layers
from mt_core.config.megatron_words import translate
from mt_core.config.schema import CORE_SECTIONS
from mt_core.config.sections import build_sections, section_types
from mt_core.errors import ConfigError, Problems, did_you_mean
from mt_core.specs import MODELS, SECTIONS

if TYPE_CHECKING:
    from mt_core.config.fields import Section
    from mt_core.plugins import Plugin, PluginHost


# -- presets: partial configurations of model families -----------------------------------------------

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
    presets: dict[str, list[Preset]] = {}
    problems = []
    for registration in host[MODELS].registrations:
        family, plugin = registration.spec.name, registration.plugin
        try:
            trees = registration.spec.presets.load()
        except Exception as error:  # another's code may raise anything, and must stop nobody else
            problems.append(f"{plugin.label} cannot give its presets: {type(error).__name__}: {error}")
            continue
        for name, tree in trees.items():
            presets.setdefault(name, []).append(Preset(family, plugin, tree))
    return presets, problems


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


log = logging.getLogger(__name__)
OVERRIDE = "--set"
"""Origin of a value that the command line gives."""


PROGRAM = "the program"
"""Origin of a value that a caller gives."""


@dataclass(frozen=True)
class Sources:
    """What a user wrote to configure a run. preset: gives way to the file's. default_preset, sections: see
    `load_config`."""

    path: str | Path | None
    preset: str | None
    overrides: Sequence[str]
    default_preset: str | None = None
    sections: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class ReadLayers:
    """All values with where they came from. problems: what is wrong so far. notes: words of others that were taken."""

    merged: Merged
    preset: str | None
    problems: Problems
    notes: Sequence[str]

    def build(self, names: Iterable[str], host: PluginHost) -> dict[str, Section]:
        """These sections, checked one by one. Raises one error with everything that is wrong."""
        return build_sections(names, self.merged, host, self.problems)

    def log_notes(self) -> None:
        for note in self.notes:
            log.warning("note: %s", note)

    def origins(self) -> dict[str, str]:
        """Dotted key -> layer."""
        return {f"{name}.{key}": origin for name, keys in self.merged.items() for key, (_, origin) in keys.items()}


def read_layers(sources: Sources, names: Iterable[str], host: PluginHost) -> ReadLayers:
    """Read and merge. names: the sections that are requested; a checkpoint is opened only for these."""
    sources = _with_named_preset(sources, host)
    file_preset, file_layer = read_config_file(Path(sources.path)) if sources.path is not None else (None, None)
    left_out: list[str] = []
    if file_layer is not None:
        file_layer, left_out = _without_absent_sections(file_layer, section_types(host))
    preset = sources.preset or file_preset
    by_default = preset is None and file_layer is None and sources.sections is None
    preset = sources.default_preset if by_default else preset
    # Lowest first: default < preset < checkpoint < file < program < --set.
    base = [Layer(f"preset {preset}", find_preset(preset, host))] if preset else []
    base += [file_layer] if file_layer else []
    base += [Layer(PROGRAM, sources.sections)] if sources.sections is not None else []
    problems = Problems()
    # Overrides before the checkpoint: they may name the checkpoint to read.
    layers, notes = translate(_with_overrides(base, sources.overrides, problems))
    layers = with_checkpoint_layer(layers, names, host, preset_is_default=by_default)
    # `base` was built without --set; one layer more is that of a checkpoint.
    settled = [layer for layer in layers if layer.origin != OVERRIDE]
    if len(settled) > len(base):  # entries of tables that the checkpoint brings can be changed, too
        # Their problems and notes were collected the first time.
        layers, _ = translate(_with_overrides(settled, sources.overrides, Problems()))
    return ReadLayers(merge_layers(layers, problems, section_types(host)), preset, problems, [*left_out, *notes])


def _with_named_preset(sources: Sources, host: PluginHost) -> Sources:
    """A preset's name in the place of a file, as `preset`: where no file has that name."""
    name = str(sources.path)
    is_file = sources.path is None or Path(name).exists()
    if is_file or sources.preset is not None or name not in installed_presets(host)[0]:
        return sources
    return replace(sources, path=None, preset=name)


def _without_absent_sections(layer: Layer, types: Mapping[str, type[Section]]) -> tuple[Layer, list[str]]:
    """The config.json of a run without sections of distributions that are not loaded here, and a note for each: a run
    writes all sections, whether or not its configuration named them."""
    if not CORE_SECTIONS.keys() <= layer.values.keys():
        return layer, []
    absent = {name: home for name, home in SECTIONS.homes.items() if name in layer.values and name not in types}
    notes = [
        f"[{name}] (from {layer.origin}) is of {home}, which is not loaded: left out" for name, home in absent.items()
    ]
    return Layer(layer.origin, {name: keys for name, keys in layer.values.items() if name not in absent}), notes


def _with_overrides(layers: Sequence[Layer], texts: Sequence[str], problems: Problems) -> list[Layer]:
    """The layers with one for each `--set` on top."""
    merged = list(layers)
    for text in texts:
        with problems.collect():
            merged.append(_override_layer(text, merged))
    return merged


def _override_layer(text: str, below: list[Layer]) -> Layer:
    """One `--set`. A path below a key (model.rope_scaling.factor) changes one entry of its table."""
    (section, key, *inner), parsed = parse_override(text)
    if inner:
        # The whole table is written again with one entry changed, as later layers replace values key by key.
        table = merge_layers(below, Problems()).get(section, {}).get(key, ({}, ""))[0]
        parsed = _with_entry(table if isinstance(table, Mapping) else {}, inner, parsed)
    return Layer(OVERRIDE, {section: {key: parsed}})


def parse_override(text: str) -> tuple[list[str], Any]:
    """`section.key=value` as --set takes it: the path, of two names or more, and the value (TOML, or else a text).

    Raises ConfigError for another form.
    """
    path, equals, value = text.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {text}: expected section.key=value, for instance train.train_iters=100")
    return parts, _parse_value(value.strip())


def _with_entry(table: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    inner = table.get(head, {})
    return {
        **table,
        head: _with_entry(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value,
    }


def _parse_value(text: str) -> Any:
    # TOML has no null.
    if text == "null":
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # Bare text, such as a path, needs no quotes on the command line. ValueError: also an integer of more digits than
    # Python converts, which is then no number for its key.
    except ValueError:
        return text
    except RecursionError:
        raise ConfigError(f"--set: {text[:40]}...: {TOO_DEEP}") from None
    try:
        require_depth(value)
    except ValueError as error:
        raise ConfigError(f"--set: {text[:40]}...: {error}") from None
    return value
