"""Default < preset < file < `--set`: layers are merged key by key, each value remembering its layer."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mt_core.config.checks import as_world, check_config, smallest_world, world_size
from mt_core.config.messages import unknown_key, validation_message
from mt_core.config.schema import REGISTRY_OF_SECTION, SECTIONS, Config, Section
from mt_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from mt_core.plugins import Plugin, PluginHost

DEFAULT = "default"
Merged = Mapping[str, Mapping[str, tuple[Any, str]]]
"""section -> key -> (value, origin)."""


@dataclass(frozen=True)
class Layer:
    """Values from one place; `origin` is how that place is shown, for instance "file run.toml"."""

    origin: str
    values: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and, for each dotted key, the layer that its value came from."""

    config: Config
    origins: Mapping[str, str]
    preset: str | None

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT)


def load_config(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Iterable[str] = (),
    host: PluginHost | None = None,
) -> LoadedConfig:
    """Read, merge and check a configuration.

    path: a TOML or JSON file; it may name a preset with the top-level key `preset`. preset: wins over
    the file's. overrides: "section.key=value" with the value written as in TOML, `null`, or bare text.
    Raises ConfigError, and PluginError for a name that no plugin registers.
    """
    host = host or _load_plugins()
    merged, preset = _read_layers(path, preset, overrides, host)
    config = _build_config(merged, host)
    loaded = LoadedConfig(config, _origins(merged), preset)
    _refuse_unused_values(loaded, SECTIONS)
    check_config(config)
    host.check_config(config)
    return loaded


def load_config_anywhere(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    host: PluginHost | None = None,
) -> LoadedConfig:
    """As `load_config`, checked for as many processes as its layout needs: to look at a run that is meant for more
    processes than there are here."""
    host = host or _load_plugins()
    parallel = load_sections(["parallel"], path, preset=preset, overrides=overrides, host=host).parallel
    with as_world(max(world_size(), smallest_world(parallel))):
        return load_config(path, preset=preset, overrides=overrides, host=host)


def load_sections(
    names: Sequence[str],
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Iterable[str] = (),
    host: PluginHost | None = None,
) -> Config:
    """A configuration with the sections `names` alone, for programs that do a part of a run's work.

    What plugins bring for the other sections need not be installed. Each section is checked by itself; rules that
    span sections are not, nor those of plugins. Other sections are attributes that do not exist.
    The other arguments and the errors are those of `load_config`.
    """
    host = host or _load_plugins()
    merged, preset = _read_layers(path, preset, overrides, host)
    sections: dict[str, Any] = {name: _build_section(name, merged.get(name, {}), host) for name in names}
    config = Config.model_construct(**sections)
    _refuse_unused_values(LoadedConfig(config, _origins(merged), preset), names)
    return config


def _read_layers(
    path: str | Path | None, preset: str | None, overrides: Iterable[str], host: PluginHost
) -> tuple[Merged, str | None]:
    """All values with where they came from, and the preset that counts."""
    file_preset, file_layer = _read_file(Path(path)) if path is not None else (None, None)
    preset = preset or file_preset
    layers = [Layer(f"preset {preset}", find_preset(preset, host))] if preset else []
    layers += [file_layer] if file_layer else []
    for text in overrides:
        layers.append(_override_layer(text, layers))
    return merge_layers(layers), preset


def _origins(merged: Merged) -> dict[str, str]:
    return {f"{name}.{key}": origin for name, keys in merged.items() for key, (_, origin) in keys.items()}


def config_from_dict(values: Mapping[str, Mapping[str, Any]], host: PluginHost) -> Config:
    """The configuration stored in a checkpoint or run directory (`Config.to_dict()`), checked again."""
    merged = merge_layers([Layer("stored configuration", values)])
    return _build_config(merged, host)


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
        raise ConfigError(
            f"preset {name} is unknown; presets are {', '.join(sorted(presets))}{did_you_mean(name, presets)}{because}"
        )
    first, *others = presets[name]
    if others:
        owners = " and ".join(f"{preset.plugin.label} for family {preset.family}" for preset in presets[name])
        raise ConfigError(f"preset {name} is brought by {owners}; keep one of them with MT_PLUGINS")
    return {**first.values, "model": {"family": first.family, **first.values.get("model", {})}}


def merge_layers(layers: Iterable[Layer]) -> dict[str, dict[str, tuple[Any, str]]]:
    """section -> key -> (value, origin), later layers winning; unknown sections are errors."""
    merged: dict[str, dict[str, tuple[Any, str]]] = {}
    for layer in layers:
        for section, values in layer.values.items():
            if section not in SECTIONS:
                raise ConfigError(unknown_key(section, None, layer.origin))
            if not isinstance(values, Mapping):
                raise ConfigError(f"{section} (from {layer.origin}): got {values!r}, expected a table of keys")
            for key, value in values.items():
                merged.setdefault(section, {})[key] = (value, layer.origin)
    return merged


def _load_plugins() -> PluginHost:
    from mt_core.plugins import load_plugins

    return load_plugins()


def _read_file(path: Path) -> tuple[str | None, Layer]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (ValueError, UnicodeDecodeError) as error:  # both decoders' errors are ValueErrors
        raise ConfigError(f"config file {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: got a {type(values).__name__}, expected sections with keys")
    preset = values.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        raise ConfigError(f"config file {path}: preset is {preset!r}, expected the name of a preset")
    return preset, Layer(f"file {path.name}", values)


def _override_layer(text: str, below: list[Layer]) -> Layer:
    """One `--set`. A path below a key (model.rope_scaling.factor) changes one entry of its table."""
    path, equals, value = text.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {text}: expected section.key=value, for instance train.train_iters=100")
    section, key, *inner = parts
    parsed = _parse_value(value.strip())
    if inner:
        table = merge_layers(below).get(section, {}).get(key, ({}, ""))[0]
        parsed = _with_entry(table if isinstance(table, Mapping) else {}, inner, parsed)
    return Layer("--set", {section: {key: parsed}})


def _with_entry(table: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    inner = table.get(head, {})
    return {
        **table,
        head: _with_entry(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value,
    }


def _parse_value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def section_type(name: str, selected: str | None, host: PluginHost) -> type[Section]:
    """The type of a section, given the value of its selector (None: the default)."""
    base = SECTIONS[name]
    if name not in REGISTRY_OF_SECTION or base.selector is None:
        return base
    if selected is None:
        field = base.model_fields[base.selector]
        if field.is_required():
            raise ConfigError(_nothing_selected(name, base.selector, host))
        selected = field.default
    registry = host.registry(REGISTRY_OF_SECTION[name])
    return registry.get(selected, key=f"{name}.{base.selector}").config_type.load()


def _nothing_selected(section: str, selector: str, host: PluginHost) -> str:
    names = host.registry(REGISTRY_OF_SECTION[section]).names()
    if not names:
        return f"{section}.{selector} is not set, and no installed plugin registers one (pip install mt-models)"
    return f"{section}.{selector} is not set; choose a preset (mt models lists them) or one of {', '.join(names)}"


def _build_config(merged: Mapping[str, Mapping[str, tuple[Any, str]]], host: PluginHost) -> Config:
    return Config.model_validate({name: _build_section(name, merged.get(name, {}), host) for name in SECTIONS})


def _build_section(name: str, values: Mapping[str, tuple[Any, str]], host: PluginHost) -> Section:
    selector = SECTIONS[name].selector
    selected, chosen_by = values.get(selector or "", (None, DEFAULT))
    if selected is not None and not isinstance(selected, str):
        raise ConfigError(f"{name}.{selector}: got {selected!r}, expected a name in quotes")
    type_ = section_type(name, selected, host)
    values = _without_replaced_preset(values, type_, chosen_by)
    try:
        return type_.model_validate({key: value for key, (value, _) in values.items()})
    except ValidationError as error:
        origins = {key: origin for key, (_, origin) in values.items()}
        raise ConfigError(validation_message(name, type_, error, origins)) from None


def _without_replaced_preset(
    values: Mapping[str, tuple[Any, str]], type_: type[Section], chosen_by: str
) -> Mapping[str, tuple[Any, str]]:
    """A preset's options of, say, adam go with adam when a file or --set chooses another optimizer."""
    if chosen_by == DEFAULT or chosen_by.startswith("preset"):
        return values
    return {
        key: (value, origin)
        for key, (value, origin) in values.items()
        if key in type_.model_fields or not origin.startswith("preset")
    }


def _refuse_unused_values(loaded: LoadedConfig, names: Iterable[str]) -> None:
    """A value that somebody wrote but nothing reads is an error (presets may set what a file turns off)."""
    for name in names:
        section = getattr(loaded.config, name)
        for key, field in type(section).model_fields.items():
            origin = loaded.origin(f"{name}.{key}")
            if origin == DEFAULT or origin.startswith("preset"):
                continue
            extra = field.json_schema_extra
            conditions = extra.get("used_when", {}) if isinstance(extra, dict) else {}
            if getattr(section, key) == field.get_default(call_default_factory=True):
                continue
            for other, allowed in conditions.items():
                if getattr(section, other) not in allowed:
                    legal = " or ".join(str(value) for value in allowed)
                    raise ConfigError(
                        f"{name}.{key} (from {origin}) would be ignored: it only counts when {name}.{other} is "
                        f"{legal}, and that is {getattr(section, other)} (from {loaded.origin(f'{name}.{other}')})"
                    )
