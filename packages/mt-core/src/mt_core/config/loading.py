"""Default < preset < checkpoint < file < `--set`: layers are merged key by key, each value remembering its layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mt_core.checkpoint_specs import CHECKPOINT_SAVERS
from mt_core.config.checks import as_world, check_warmup, collect_broken_rules, smallest_world, world_size
from mt_core.config.fields import Section
from mt_core.config.layers import DEFAULT, Layer, merge_layers
from mt_core.config.megatron_words import refuse_foreign_formats, translate
from mt_core.config.schema import CORE_SECTIONS, Config
from mt_core.config.sections import build_sections, refuse_unused_values, section_types
from mt_core.config.sources import Sources, parse_override, read_layers
from mt_core.errors import ConfigError, MtError, Problems
from mt_core.specs import CALLBACKS, LOSSES, PIPELINE_SCHEDULES

ORIGINS_FILE = "config-origins.json"
"""Beside the config.json of a run: dotted key -> the layer that its value came from."""

if TYPE_CHECKING:
    from mt_core.plugins import PluginHost, Registry


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
    default_preset: str | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> LoadedConfig:
    """Read, merge and check a configuration.

    path: a TOML, JSON or YAML file, which may name a preset with the top-level key `preset`; or a preset's name,
    where no file has it. preset: wins over the file's. overrides: "section.key=value" with the value written as in
    TOML, `null`, or bare text.
    default_preset: used where neither path nor preset is given; checkpoint.load replaces its model and tokenizer.
    sections: values of a program, section -> key -> value; they win over the file's.
    Raises ConfigError with a line for each thing that is wrong, PluginError for a name that no plugin registers, and
    CheckpointError where model or tokenizer come from a checkpoint.load that cannot be read.
    """
    host = host or _load_plugins()
    names = section_types(host)
    read = read_layers(Sources(path, preset, list(overrides), default_preset, sections), names, host)
    config = _assemble(read.build(names, host))
    loaded = LoadedConfig(config, _with_stored_presets(read.origins(), path), read.preset)
    _check(loaded, host)
    read.log_notes()
    return loaded


def _with_stored_presets(origins: Mapping[str, str], path: str | Path | None) -> Mapping[str, str]:
    """Origins of a run's config.json: what a preset gave to the run is still the preset's, with the same rights."""
    if path is None or Path(path).name != "config.json":
        return origins
    try:
        stored = json.loads(Path(path).with_name(ORIGINS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return origins
    return {
        key: str(stored[key])
        if origin == f"file {Path(path).name}" and key in stored and str(stored[key]).startswith("preset ")
        else origin
        for key, origin in origins.items()
    }


def _check(loaded: LoadedConfig, host: PluginHost, *, length: bool = True) -> None:
    """The rules that span keys; those of plugins may rely on the others. length: also those of schedule and run."""
    problems = Problems()
    refuse_unused_values(loaded.config, section_types(host), loaded.origin, problems)
    with problems.collect():
        refuse_foreign_formats(loaded.config.checkpoint.ckpt_format, host[CHECKPOINT_SAVERS].names())
    collect_broken_rules(loaded.config, problems)
    with problems.collect():
        if length:
            check_warmup(loaded.config, loaded.origin)
    _require_registered(loaded.config, host, problems)
    problems.stop_if_any()
    # Not collected: plugins may compute with values that the rules above require, and fail on others.
    host.check_config(loaded.config)


def _require_registered(config: Config, host: PluginHost, problems: Problems) -> None:
    """Names whose plugin brings no section of its own, which building sections does not look up."""
    named: list[tuple[Registry[Any], str, Sequence[str]]] = [
        (host[LOSSES], "train.loss", [config.train.loss] if config.train.loss != "auto" else []),
        (host[CALLBACKS], "train.callbacks", config.train.callbacks),
        (host[CALLBACKS], "logging.trackers", config.logging.trackers),
        (host[PIPELINE_SCHEDULES], "parallel.pipeline_schedule", [config.parallel.pipeline_schedule]),
    ]
    for registry, key, names in named:
        for name in names:
            with problems.collect():
                registry.get(name, key=key)


def with_changed_key(config: Config, override: str, origin: str, host: PluginHost) -> Config:
    """A configuration with another value of one key of a core section, `section.key=value`, checked as a whole.

    Raises ConfigError, as `load_config` does.
    """
    (name, key, *inner), value = parse_override(override)
    if inner:
        raise ConfigError(f"{override}: a part of {name}.{key} cannot be changed by itself")
    values = {known: (kept, DEFAULT) for known, kept in getattr(config, name).model_dump(mode="json").items()}
    problems = Problems()
    built = build_sections([name], {name: {**values, key: (value, origin)}}, host, problems)
    problems.stop_if_any()
    changed = config.model_copy(update={name: built[name]})
    # The length of the schedule was accepted as the run began, with origins that are not known here.
    length = name == "lr_schedule" or (name == "train" and key.startswith("train_"))
    _check(LoadedConfig(changed, {f"{name}.{key}": origin}, None), host, length=length)
    return changed


def load_config_anywhere(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    host: PluginHost | None = None,
    default_preset: str | None = None,
) -> LoadedConfig:
    """Load as `load_config` does, but check for as many processes as the layout needs: to look at a run that is meant
    for more processes than there are here."""
    host = host or _load_plugins()
    sources = Sources(path, preset, overrides, default_preset)
    with as_world(_enough_processes(sources, host)):
        return load_config(path, preset=preset, overrides=overrides, host=host, default_preset=default_preset)


def _enough_processes(sources: Sources, host: PluginHost) -> int:
    try:
        parallel: Any = read_layers(sources, ["parallel"], host).build(["parallel"], host)["parallel"]
    except MtError:
        return world_size()  # reported by load_config, with everything else that is wrong
    return max(world_size(), smallest_world(parallel))


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
    read = read_layers(Sources(path, preset, list(overrides)), names, host)
    # Without validation: the other sections are missing, and these were checked one by one.
    config = Config.model_construct(**cast(Any, _arrange(read.build(names, host))))
    problems = Problems()
    refuse_unused_values(config, names, LoadedConfig(config, read.origins(), read.preset).origin, problems)
    problems.stop_if_any()
    read.log_notes()
    return config


def config_from_dict(values: Mapping[str, Mapping[str, Any]], host: PluginHost) -> Config:
    """The configuration stored in a checkpoint or run directory (`Config.to_dict()`), checked again. Sections whose
    distributions are not installed are kept as they are."""
    layers, _ = translate([Layer("stored configuration", values)])
    merged, types = merge_layers(layers), section_types(host)
    known = {name: keys for name, keys in merged.items() if name in types}
    foreign = {name: {key: value for key, (value, _) in merged[name].items()} for name in merged.keys() - types.keys()}
    return _assemble(build_sections(types, known, host, Problems()), foreign)


def _assemble(sections: Mapping[str, Section], foreign: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    return Config.model_validate({**_arrange(sections), "foreign": foreign or {}})


def _arrange(sections: Mapping[str, Section]) -> dict[str, Any]:
    """Fields of Config for sections by name."""
    core = {name: section for name, section in sections.items() if name in CORE_SECTIONS}
    return {**core, "brought": {name: section for name, section in sections.items() if name not in core}}


def _load_plugins() -> PluginHost:
    from mt_core.plugins import load_plugins

    return load_plugins()
