"""Values of one section as its type, and the refusal of values that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mt_core.config.fields import Section
from mt_core.config.layers import DEFAULT, Layer, Merged
from mt_core.config.messages import unknown_key, validation_message
from mt_core.config.schema import CORE_SECTIONS, REGISTRY_OF_SECTION, PlainModuleConfig
from mt_core.errors import ConfigError, PluginError, Problems
from mt_core.specs import PLAIN_MODULE, SECTIONS

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost


def section_types(host: PluginHost) -> dict[str, type[Section]]:
    """Name -> type, of the sections of mt-core and of those that distributions bring.

    Raises PluginError for a section of two plugins, or of a plugin and of mt-core.
    """
    brought = {spec.name: spec.config_type.load() for spec in host[SECTIONS].distinct()}
    for name in brought.keys() & CORE_SECTIONS.keys():
        owners = " and ".join(plugin.label for plugin in host[SECTIONS].owners(name))
        raise PluginError(f"[{name}] is a section of mt-core, and {owners} registers another of this name; rename it")
    return {**CORE_SECTIONS, **brought}


def build_sections(names: Iterable[str], merged: Merged, host: PluginHost, problems: Problems) -> dict[str, Section]:
    """Section -> its value. Raises one error with all that is wrong, in these sections and in `problems` before."""
    sections = {}
    for name in names:
        with problems.collect():
            sections[name] = _build_section(name, merged.get(name, {}), host)
    problems.stop_if_any()
    return sections


def section_type(name: str, selected: str | None, host: PluginHost) -> type[Section]:
    """The type of a section, given the value of its selector (None: the default)."""
    base = section_types(host)[name]
    if name not in REGISTRY_OF_SECTION or base.selector is None:
        return base
    if selected is None:
        field = base.model_fields[base.selector]
        if field.is_required():
            raise ConfigError(nothing_selected(name, base.selector, host))
        selected = field.default
    registry = host.registry(REGISTRY_OF_SECTION[name])
    return registry.get(selected, key=f"{name}.{base.selector}").config_type.load()


def nothing_selected(section: str, selector: str, host: PluginHost) -> str:
    """The message where a section needs a selection and has none."""
    names = [name for name in host.registry(REGISTRY_OF_SECTION[section]).names() if name != PLAIN_MODULE]
    if not names:
        return f"{section}.{selector} is not set, and no installed plugin registers one (pip install mt-models)"
    return f"{section}.{selector} is not set; choose a preset (mt models lists them) or one of {', '.join(names)}"


def _build_section(name: str, values: Mapping[str, tuple[Any, str]], host: PluginHost) -> Section:
    sections = section_types(host)
    selector = sections[name].selector
    selected, chosen_by = values.get(selector or "", (None, DEFAULT))
    if selected is not None and not isinstance(selected, str):
        raise ConfigError(f"{name}.{selector}: got {selected!r}, expected a name in quotes")
    if name == "model" and not values and PLAIN_MODULE in host.registry(REGISTRY_OF_SECTION[name]).names():
        # A program may give the model itself; without one, building this family fails with nothing_selected().
        return PlainModuleConfig()
    try:
        type_ = section_type(name, selected, host)
    # Nothing is selected. With a name that is not registered (PluginError) the keys may be those of a missing plugin.
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_keys_of_no_type(name, values, host)])) from None
    # Options of the selection that was replaced would be unknown keys of the new type.
    values = _without_replaced_preset(values, type_, chosen_by)
    try:
        return type_.model_validate({key: value for key, (value, _) in values.items()})
    except ValidationError as error:
        origins = {key: origin for key, (_, origin) in values.items()}
        # from None: the sentence says all that pydantic's error does.
        raise ConfigError(validation_message(name, type_, error, origins, sections, _types(name, host))) from None


def _keys_of_no_type(name: str, values: Mapping[str, tuple[Any, str]], host: PluginHost) -> list[str]:
    """A line for each key that is wrong whatever is selected."""
    types = _types(name, host)
    known = {key for type_ in types.values() for key in type_.model_fields}
    # Without a plugin that registers a type, nothing is known of the keys.
    wrong = {key: origin for key, (_, origin) in values.items() if known and key not in known}
    return [unknown_key(name, key, origin, section_types(host), None, types) for key, origin in wrong.items()]


def _types(name: str, host: PluginHost) -> dict[str, type[Section]]:
    """Value of the section's selector -> its type."""
    if name not in REGISTRY_OF_SECTION:
        return {}
    return {spec.name: spec.config_type.load() for spec in host.registry(REGISTRY_OF_SECTION[name])}


def _without_replaced_preset(
    values: Mapping[str, tuple[Any, str]], type_: type[Section], chosen_by: str
) -> Mapping[str, tuple[Any, str]]:
    """A preset's options of, say, adam go with adam when a file or --set chooses another optimizer."""
    # The preset's own selection keeps the preset's options, so that a wrong one among them is found.
    if chosen_by == DEFAULT or chosen_by.startswith("preset "):
        return values
    return {
        key: (value, origin)
        for key, (value, origin) in values.items()
        if key in type_.model_fields or not origin.startswith("preset ")
    }


# -- values that nothing reads -----------------------------------------------------------------------


def refuse_unused_values(
    config: Config, names: Iterable[str], origin_of: Callable[[str], str], problems: Problems
) -> None:
    """Collect a ConfigError for each such value in the sections `names`.

    A preset or a checkpoint may set what a file turns off. origin_of: dotted key -> layer.
    """
    for name in names:
        section = config.named(name)
        for key, field in type(section).model_fields.items():
            origin = origin_of(f"{name}.{key}")
            # A value that equals the default is not lost when it is ignored.
            if origin == DEFAULT or Layer(origin, {}).is_background or _is_default(section, key, field):
                continue
            with problems.collect():
                _require_used(config, name, key, field, origin_of)


def _is_default(section: Section, key: str, field: FieldInfo) -> bool:
    return bool(getattr(section, key) == field.get_default(call_default_factory=True))


def conditions_of(section: str, field: FieldInfo) -> dict[str, list[Any]]:
    """Dotted key -> values with which the field counts (`used_when`)."""
    extra = field.json_schema_extra
    conditions: Any = extra.get("used_when", {}) if isinstance(extra, dict) else {}
    return {key if "." in key else f"{section}.{key}": allowed for key, allowed in conditions.items()}


def _require_used(config: Config, name: str, key: str, field: FieldInfo, origin_of: Callable[[str], str]) -> None:
    for other, allowed in conditions_of(name, field).items():
        section, _, other_key = other.partition(".")
        if section not in config.brought and not hasattr(config, section):
            continue  # a configuration of some sections alone
        value = getattr(config.named(section), other_key)
        # Of a list one entry has to be allowed, such as recompute_modules with a certain module.
        if not any(entry in allowed for entry in (value if isinstance(value, list) else [value])):
            verb = "has" if isinstance(value, list) else "is"
            legal = " or ".join(str(value) for value in allowed)
            raise ConfigError(
                f"{name}.{key} (from {origin_of(f'{name}.{key}')}) would be ignored: it only counts when "
                f"{other} {verb} {legal}, and that is {value} (from {origin_of(other)})"
            )
