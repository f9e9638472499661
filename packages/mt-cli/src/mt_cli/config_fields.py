"""Description of each configuration key: type, default, conditions, help, names in other software."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo

from mt_core.config.fields import Section
from mt_core.config.files import shown
from mt_core.config.messages import MEGATRON_KEYS, key_in_section
from mt_core.config.schema import CORE_SECTIONS, REGISTRY_OF_SECTION
from mt_core.config.sections import conditions_of, section_types
from mt_core.errors import ConfigError, MtError, did_you_mean
from mt_core.plugins import PluginHost, Registry
from mt_core.specs import FEED_FORWARDS, MOE_DISPATCHERS


@dataclass(frozen=True)
class ConfigField:
    """One key of a section, as one type of that section declares it."""

    section: str
    key: str
    type: str
    default: str
    """TOML, "null", or "required"."""
    doc: str
    conditions: Mapping[str, list[Any]]
    """Dotted key -> values with which this key counts; empty: it always counts."""
    selected_by: tuple[str, ...] = ()
    """Values of the section's selector that bring this key; empty: every one has it."""

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.key}"

    def condition(self) -> str:
        """ "model.position_embedding_type is rope", or nothing."""
        parts = [f"{key} is {' or '.join(map(shown, values))}" for key, values in self.conditions.items()]
        return " and ".join(parts)


DISPATCHER_OPTIONS = "model.moe.moe_dispatcher_options"


def section_fields(section: str, host: PluginHost) -> list[ConfigField]:
    """The keys of a section or of a table below one: those that all its types have, then those that plugins' types
    add or redefine."""
    base = section_types(host).get(section)
    fields = [_describe(section, key, info) for key, info in base.model_fields.items()] if base else []
    # Two declarations of a key are one field if all four agree: then only the list of selector values grows. A family
    # that redefines a key with another default or text gets an entry of its own.
    known = {(field.key, field.type, field.default, field.doc): index for index, field in enumerate(fields)}
    for name, type_ in _plugin_types(section, host):
        for key, info in type_.model_fields.items():
            if base is not None and key == base.selector:
                continue  # a type names itself there
            field = _describe(section, key, info, name if selector(section) else None)
            # The index of the equal field, or of the place that this one gets now.
            same = known.setdefault((key, field.type, field.default, field.doc), len(fields))
            if same == len(fields):
                fields.append(field)
            # Empty selected_by means that all types have the key, as the base section declares it; nothing is added
            # then.
            elif fields[same].selected_by:
                fields[same] = _also_selected_by(fields[same], name)
    return fields


def section_names(host: PluginHost) -> list[str]:
    """The sections, each followed by the tables below it: model.moe is one, with a type of its own."""
    return [table for section in section_types(host) for table in (section, *_tables(section, host))]


def _tables(section: str, host: PluginHost) -> list[str]:
    if section != "model":
        return []
    blocks = [f"model.{name}" for name in _feed_forward_keys(host)]
    return [*blocks, *([DISPATCHER_OPTIONS] if "model.moe" in blocks else [])]


def _feed_forward_keys(host: PluginHost) -> list[str]:
    """Feed-forwards whose options are a key of some model family, such as moe."""
    keys = {key for _, type_ in _plugin_types("model", host) for key in type_.model_fields}
    return [name for name in host[FEED_FORWARDS].names() if name in keys]


def selector(section: str) -> str | None:
    """The dotted key that chooses the type of a section or table."""
    if section == DISPATCHER_OPTIONS:
        return "model.moe.moe_token_dispatcher_type"
    base = CORE_SECTIONS.get(section)
    return f"{section}.{base.selector}" if base is not None and base.selector is not None else None


def find_fields(dotted: str, host: PluginHost) -> list[ConfigField]:
    """Every declaration of `section.key`, or of `key` in any section. Raises ConfigError if there is none."""
    section, dot, key = dotted.rpartition(".")
    sections = [require_section(section, host)] if dot else section_names(host)
    everything = [field for name in sections for field in section_fields(name, host)]
    matching = [field for field in everything if field.key == key]
    if not matching:
        if key in MEGATRON_KEYS:
            raise ConfigError(f"{key} is an option of Megatron's and no key here: {MEGATRON_KEYS[key]}")
        if split := key_in_section(key, section_types(host)):
            raise ConfigError(f"unknown key {dotted}; it is a key of [{split.partition('.')[0]}]: write {split}")
        names = [field.dotted for field in everything] + [field.key for field in everything]
        where = f"unknown key {dotted}{did_you_mean(dotted, names)}"
        raise ConfigError(f"{where}; mt config keys {section if dot else ''}".rstrip() + " lists them")
    return matching


def require_section(name: str, host: PluginHost) -> str:
    known = section_names(host) if "." in name else list(section_types(host))
    if name not in known:
        raise ConfigError(f"unknown section {name}{did_you_mean(name, known)}; sections are {', '.join(known)}")
    return name


def _plugin_types(section: str, host: PluginHost) -> Iterator[tuple[str, type[Section]]]:
    """Selector value -> type, for each registered thing of the section; one that cannot be imported is left out."""
    registry = _registry(section, host)
    if registry is None:
        return
    # A table such as model.moe has one type: that of the feed-forward of this name.
    names = [section.removeprefix("model.")] if registry is host[FEED_FORWARDS] else registry.names()
    for name in names:
        try:
            yield name, registry.get(name).config_type.load()
        except (ImportError, AttributeError, MtError):
            continue  # `mt plugins` shows duplicates, `mt train` the import


def _registry(section: str, host: PluginHost) -> Registry[Any] | None:
    if section in REGISTRY_OF_SECTION:
        return host.registry(REGISTRY_OF_SECTION[section])
    if section == DISPATCHER_OPTIONS:
        return host[MOE_DISPATCHERS]
    return host[FEED_FORWARDS] if section.startswith("model.") else None


def _also_selected_by(field: ConfigField, name: str) -> ConfigField:
    from dataclasses import replace

    return replace(field, selected_by=(*field.selected_by, name))


def _describe(section: str, key: str, info: FieldInfo, selected_by: str | None = None) -> ConfigField:
    return ConfigField(
        section=section,
        key=key,
        type=type_in_words(info),
        default="required" if info.is_required() else shown(_plain(info.get_default(call_default_factory=True))),
        doc=" ".join((info.description or "").split()),
        conditions=conditions_of(section, info),
        selected_by=(selected_by,) if selected_by else (),
    )


def _plain(value: Any) -> Any:
    """A default as JSON values."""
    return json.loads(TypeAdapter(Any).dump_json(value))


def type_in_words(info: FieldInfo) -> str:
    """ "integer > 0 or null", from the JSON schema of the field's type."""
    annotated: Any = info.annotation
    try:
        schema = TypeAdapter(annotated).json_schema()
    except PydanticInvalidForJsonSchema:
        return str(annotated)
    limits = _schema_of_limits(info)
    # pydantic keeps limits of Field(gt=...) in the metadata of the field, outside of the annotation.
    return _words({**schema, **limits}, schema.get("$defs", {}))


def _schema_of_limits(info: FieldInfo) -> dict[str, Any]:
    """Bounds that stand beside the annotation rather than in it."""
    names = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
    return {
        name: getattr(entry, attribute)
        for entry in info.metadata
        for attribute, name in names.items()
        if hasattr(entry, attribute)
    }


def _words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        # "#/$defs/Name"
        return _words(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return " or ".join(_words(option, definitions) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(shown, schema["enum"]))
    if "const" in schema:
        return shown(schema["const"])
    kind = schema.get("type")
    if kind == "array":
        return _array(schema, definitions)
    if kind in ("integer", "number"):
        return kind + _bounds(schema)
    names = {"boolean": "true | false", "string": "text", "object": "table", "null": "null"}
    return names.get(str(kind), "any value")


def _array(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(_words(item, definitions) for item in schema['prefixItems'])}]"
    return f"list of {_words(schema['items'], definitions)}" if schema.get("items") else "list"


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    return f" {' and '.join(bounds)}" if bounds else ""


# -- names of keys in other software, as plugins register them ---------------------------------------


def names_of(key: str, host: PluginHost) -> dict[str, Sequence[str]]:
    """Software -> its names for a dotted key, of those that have one."""
    by_software = {spec.name: spec.names.load()().get(key, ()) for spec in _key_names(host)}
    return {software: names for software, names in by_software.items() if names}


def keys_called(name: str, host: PluginHost) -> list[str]:
    """The dotted keys that are called so somewhere."""
    return [key for spec in _key_names(host) for key, names in spec.names.load()().items() if name in names]


def sentences_about(name: str, host: PluginHost) -> list[str]:
    """What is said of a name that stands for no key."""
    explained = [(spec.name, spec.explain.load()(name)) for spec in _key_names(host) if spec.explain is not None]
    return [f"{name} ({software}): {sentence}" for software, sentence in explained if sentence is not None]


def _key_names(host: PluginHost) -> list[Any]:
    """Specs of the kind key_names; none where mt-import, which declares it, is not installed."""
    return list(host.registry("key_names")) if "key_names" in host.kinds else []
