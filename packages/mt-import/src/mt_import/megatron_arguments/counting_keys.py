"""Which keys of a translated run count, by what the configuration says of its own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from mt_core.config.schema import SECTIONS, Section
from mt_core.config.sections import section_type
from mt_core.plugins import PluginHost

Tree = dict[str, dict[str, Any]]


def as_tree(keys: Mapping[str, Any]) -> Tree:
    """Dotted key -> value, as sections."""
    tree: Tree = {}
    for dotted, value in keys.items():
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = value
    return tree


def remove_idle_keys(tree: Tree, host: PluginHost) -> dict[str, str]:
    """Take keys out of the tree that would be ignored. Returns each dotted key with the reason."""
    removed: dict[str, str] = {}
    for name, values in tree.items():
        type_ = _type_of(name, values, host)
        while idle := _idle_keys(name, values, type_):  # a key that goes may be the condition of another one
            for key, reason in idle.items():
                del values[key]
                removed[f"{name}.{key}"] = reason
    return removed


def remove_defaults(tree: Tree, host: PluginHost) -> dict[str, Any]:
    """Take keys out of the tree that say what would be so without them. Returns them, dotted, with their values."""
    removed: dict[str, Any] = {}
    for name, values in tree.items():
        base, type_ = SECTIONS[name], _type_of(name, values, host)
        # A type names itself in its selector, which is no default of the section.
        fields = {**type_.model_fields, **{key: base.model_fields[key] for key in [base.selector] if key is not None}}
        removed |= _take_defaults(f"{name}.", values, fields)
    if moe := tree.get("model", {}).get("moe"):
        type_of_moe: Any = host.feed_forwards.get("moe", key="model.moe").config_type.load()
        removed |= _take_defaults("model.moe.", moe, type_of_moe.model_fields)
    return removed


def _take_defaults(prefix: str, values: dict[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    same = [
        key
        for key, value in values.items()
        if not fields[key].is_required() and _plain(value) == _plain(fields[key].get_default(call_default_factory=True))
    ]
    return {f"{prefix}{key}": values.pop(key) for key in same}


def _type_of(name: str, values: Mapping[str, Any], host: PluginHost) -> type[Section]:
    return section_type(name, values.get(SECTIONS[name].selector or ""), host)


def _idle_keys(name: str, values: Mapping[str, Any], type_: type[Section]) -> dict[str, str]:
    found = {}
    for key in values:
        if key not in type_.model_fields:
            selector = SECTIONS[name].selector
            found[key] = f"{name}.{selector}={values.get(selector or '')} does not have it"
        elif reason := _unmet(name, key, values, type_):
            found[key] = reason
    return found


def _unmet(name: str, key: str, values: Mapping[str, Any], type_: type[Section]) -> str | None:
    extra = type_.model_fields[key].json_schema_extra
    conditions: Any = extra.get("used_when", {}) if isinstance(extra, dict) else {}
    for other, allowed in conditions.items():
        # A condition that is not written has its default.
        default = type_.model_fields[other].get_default(call_default_factory=True)
        value = values.get(other, default)
        if not any(entry in allowed for entry in (value if isinstance(value, list) else [value])):
            return f"counts only when {name}.{other} is {' or '.join(map(str, allowed))}"
    return None


def _plain(value: Any) -> Any:
    # The tree has lists, as TOML and JSON; defaults may be tuples.
    return list(value) if isinstance(value, tuple) else value
