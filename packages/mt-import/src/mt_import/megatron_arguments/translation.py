"""Megatron's arguments as a configuration, with an account of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo

from mt_core.config.fields import Section
from mt_core.config.sections import conditions_of, section_type, section_types
from mt_core.plugins import PluginHost
from mt_core.specs import FEED_FORWARDS, SECTIONS
from mt_import.megatron_arguments.command_line import ParsedArgument
from mt_import.megatron_arguments.derived import derive_values, padded_vocab_size
from mt_import.megatron_arguments.entry_scripts import EntryScript
from mt_import.megatron_arguments.refusals import Refusal, find_refusals
from mt_import.megatron_arguments.sections import dropped_keys, model_section, run_keys
from mt_import.megatron_arguments.table import Argument, Version

# -- keys that count, by their conditions in the configuration ---------------------------------------

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
        # A key that goes may be the condition of another one.
        while idle := _idle_keys(name, tree, type_, host):
            for key, reason in idle.items():
                del values[key]
                removed[f"{name}.{key}"] = reason
    return removed


def remove_defaults(tree: Tree, host: PluginHost) -> dict[str, Any]:
    """Take keys out of the tree that say what would be so without them. Returns them, dotted, with their values."""
    removed: dict[str, Any] = {}
    for name, values in tree.items():
        base, type_ = section_types(host)[name], _type_of(name, values, host)
        # A type names itself in its selector, which is no default of the section.
        fields = {**type_.model_fields, **{key: base.model_fields[key] for key in [base.selector] if key is not None}}
        removed |= _take_defaults(f"{name}.", values, fields)
    if moe := tree.get("model", {}).get("moe"):
        type_of_moe: Any = host[FEED_FORWARDS].get("moe", key="model.moe").config_type.load()
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
    return section_type(name, values.get(section_types(host)[name].selector or ""), host)


def _idle_keys(name: str, tree: Tree, type_: type[Section], host: PluginHost) -> dict[str, str]:
    values, selector = tree[name], section_types(host)[name].selector
    reasons = {}
    for key in values:
        if key not in type_.model_fields:
            reasons[key] = f"{name}.{selector}={values.get(selector or '')} does not have it"
        elif reason := _unmet(name, type_.model_fields[key], tree, host):
            reasons[key] = reason
    return reasons


def _unmet(name: str, field: FieldInfo, tree: Tree, host: PluginHost) -> str | None:
    for dotted_key, allowed in conditions_of(name, field).items():
        section, _, key = dotted_key.partition(".")
        values = tree.get(section, {})
        # A condition that is not written has its default.
        default = _type_of(section, values, host).model_fields[key].get_default(call_default_factory=True)
        value = values.get(key, default)
        if not any(entry in allowed for entry in (value if isinstance(value, list) else [value])):
            return f"counts only when {dotted_key} is {' or '.join(map(str, allowed))}"
    return None


def _plain(value: Any) -> Any:
    # The tree has lists, as TOML and JSON; defaults may be tuples.
    return list(value) if isinstance(value, tuple) else value


Status = Literal["translated", "default", "no effect", "refused"]


@dataclass(frozen=True)
class Account:
    """What became of one argument. keys: dotted, with the values that it decides, among others."""

    words: str
    status: Status
    keys: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Translation:
    """sections: the configuration, of keys that differ from our defaults or were given; None is null.

    accounts: of each argument that was given. written_out: keys that no given argument names: Megatron's defaults where
    ours are others, and values that Megatron derives. values: its attributes after validation.
    """

    sections: Tree
    accounts: tuple[Account, ...]
    written_out: Mapping[str, Any]
    values: Mapping[str, Any]
    entry: EntryScript
    version: Version

    @property
    def padded_vocab_size(self) -> int | None:
        """Rows of Megatron's table of token embeddings, where the arguments say how many ids there are."""
        size = self.sections.get("tokenizer", {}).get("vocab_size")
        multiple, ranks = self.values["make_vocab_size_divisible_by"], self.values["tensor_model_parallel_size"]
        return padded_vocab_size(size, multiple, ranks) if size is not None else None


def version_of(parsed_arguments: Mapping[str, ParsedArgument]) -> Version:
    """Megatron's main branch, unless an argument is only older versions'."""
    return (
        "0.12" if any(parsed.argument.versions in ("0.12", "older") for parsed in parsed_arguments.values()) else "main"
    )


def translate(
    parsed_arguments: Mapping[str, ParsedArgument],
    entry: EntryScript,
    host: PluginHost,
    *,
    source: str = "arguments",
    version: Version | None = None,
    world_size: int | None = None,
    is_part: bool = False,
) -> Translation:
    """parsed_arguments: attribute -> argument, as `parse_arguments` returns them. source: what messages call them.

    is_part: the arguments are those of a model, and others are given elsewhere: none is missing, and only sections that
    an argument decides are written, with all of [model].

    Arguments that cannot be done, or belong to what the entry script has in its code, are left out and accounted for as
    refused. Raises ConfigError for arguments that contradict one another, and for a model that no family is.
    """
    version = version or version_of(parsed_arguments)
    refusals = find_refusals(parsed_arguments, entry, version, host)
    kept = {dest: parsed.value for dest, parsed in parsed_arguments.items() if dest not in refusals}
    values = derive_values(kept, entry, version, world_size, is_part=is_part)
    keys = run_keys(values, entry, version)
    dropped = dropped_keys(values) | _not_installed(keys, host)
    tree = as_tree({key: value for key, value in keys.items() if key not in dropped})
    if "model" not in entry.fixed_sections:
        tree["model"] = {**tree.get("model", {}), **model_section(values, entry, source, host)}
    for section in entry.fixed_sections:
        tree.pop(section, None)
    if is_part:
        _keep_named(tree, parsed_arguments)
    # Idle keys before defaults: whether a key counts depends on values that may be defaults.
    idle = dropped | remove_idle_keys(tree, host)
    same = remove_defaults(tree, host)
    # After derive_values: these arguments take part in Megatron's validation.
    refusals |= {
        dest: Refusal(parsed, entry.fixed)
        for dest, parsed in parsed_arguments.items()
        if _is_fixed(parsed.argument, entry)
    }
    accounts = [_account(dest, parsed, refusals, tree, idle, same) for dest, parsed in parsed_arguments.items()]
    # Keys that no given argument names: Megatron's defaults and derived values, which differ from ours.
    named = {key for account in accounts for key in account.keys}
    written = {key: value for key, value in dotted(tree).items() if key not in named}
    return Translation(_ordered(tree, host), tuple(accounts), written, values, entry, version)


def _not_installed(keys: Iterable[str], host: PluginHost) -> dict[str, str]:
    """Those of the keys whose section another distribution brings, which is not installed, each with the reason."""
    sections = {key: key.partition(".")[0] for key in keys}
    absent = {key: section for key, section in sections.items() if section not in section_types(host)}
    # What turns profiling on cannot stand without the section.
    absent |= dict.fromkeys(("train.callbacks",) if "profile" in absent.values() else (), "profile")
    return {
        key: f"[{section}] is a section of {SECTIONS.homes[section]}; install it" for key, section in absent.items()
    }


def _keep_named(tree: Tree, parsed_arguments: Mapping[str, ParsedArgument]) -> None:
    """Remove keys that no given argument decides, except those of [model]."""
    named = {key for parsed in parsed_arguments.values() for key in parsed.argument.keys}
    for section in [name for name in tree if name != "model"]:
        tree[section] = {key: value for key, value in tree[section].items() if f"{section}.{key}" in named}


def _is_fixed(argument: Argument, entry: EntryScript) -> bool:
    """Whether it belongs to what the script has in its code."""
    sections = {key.partition(".")[0] for key in argument.keys}
    return argument.group in entry.fixed_groups or (bool(sections) and sections <= set(entry.fixed_sections))


def dotted(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sections as dotted keys, those of tables in [model] one by one."""
    flat = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    for table in TABLES:
        keys = flat.pop(table, None) or {}
        flat |= {f"{table}.{key}": value for key, value in keys.items()}
    return flat


DECODER = "model.language_model"
TABLES = (DECODER, "model.vision_model", f"{DECODER}.moe", "model.moe")


def _keys_of(argument: Argument, flat: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that an argument decides; of [model] those of the decoder, where that is a part of it."""
    if not any(key.startswith(f"{DECODER}.") for key in flat):
        return argument.keys
    written = [key for key in argument.keys if key in flat]
    decoders = [key.replace("model.", f"{DECODER}.", 1) for key in argument.keys if key.startswith("model.")]
    return tuple(dict.fromkeys([*written, *decoders, *argument.keys]))


def _account(
    dest: str,
    parsed: ParsedArgument,
    refusals: Mapping[str, Refusal],
    tree: Tree,
    idle: Mapping[str, str],
    same: Mapping[str, Any],
) -> Account:
    argument = parsed.argument
    if dest in refusals:
        return Account(parsed.words, "refused", {}, refusals[dest].reason)
    if argument.outcome == "none":
        return Account(parsed.words, "no effect", {}, argument.why_without_effect)
    flat = dotted(tree)
    if keys := {key: flat[key] for key in _keys_of(argument, flat) if key in flat}:
        # model.family follows from many arguments; it is shown for one that decides nothing else.
        without_family = {key: value for key, value in keys.items() if not key.endswith(".family")}
        return Account(parsed.words, "translated", without_family or keys, "")
    if equal := {key: same[key] for key in argument.keys if key in same}:
        return Account(parsed.words, "default", equal, "")
    reason = next(
        (idle[key] for key in argument.keys if key in idle),
        "says what is so without it, or does not count with the other arguments",
    )
    return Account(parsed.words, "no effect", {}, reason)


def _ordered(tree: Tree, host: PluginHost) -> Tree:
    """In the order of the schema, without empty sections."""
    return {name: tree[name] for name in section_types(host) if tree.get(name)}
