"""Turns what pydantic finds into sentences that name the key, its origin, what was given and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from mt_core.config.fields import Section
from mt_core.errors import did_you_mean
from mt_core.specs import SECTIONS

MEGATRON_KEYS: Mapping[str, str] = {
    "attention_head_type": "write model.num_query_groups=1 for multiquery; multihead is the default",
    "finetune": "checkpoint.load=PATH starts from weights alone, at step 0 with a new optimizer",
    "json_keys": "it is an option: mt data preprocess --json-keys",
    "json_key": "data.json_key of raw text data sets, or the option mt data preprocess --json-keys",
}
"""Option of Megatron's that is no key here -> what to write instead, in whatever section it stands."""

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "list_type": 'a list, in brackets: ["..."]',
    "tuple_type": "a list",
    "dict_type": "a table",
}


def validation_message(
    section: str,
    type_: type[Section],
    error: ValidationError,
    origins: Mapping[str, str],
    sections: Mapping[str, type[Section]] | None = None,
    other_types: Mapping[str, type[Section]] | None = None,
) -> str:
    """One line for each thing that is wrong in a section. sections: all of them, by name; None: no other section is
    suggested for a misplaced key. other_types: value of the
    section's selector -> its type."""
    lines: dict[str, list[str]] = {}
    for entry in error.errors():
        where, what = _line(section, type_, dict(entry), origins, sections or {}, other_types or {})
        lines.setdefault(where, []).append(what)
    # dict.fromkeys drops repeated reasons and keeps their order.
    return "\n".join(where + " or ".join(dict.fromkeys(whats)) for where, whats in lines.items())


_BRANCH = re.compile(r"(constrained-)?(str|int|float|bool)|[a-z-]+\[.*\]")
"""What pydantic adds to the path of a value that may be of several types: the one that was tried."""


def _line(
    section: str,
    type_: type[Section],
    entry: dict[str, Any],
    origins: Mapping[str, str],
    sections: Mapping[str, type[Section]],
    other_types: Mapping[str, type[Section]],
) -> tuple[str, str]:
    """What is meant, and what is wrong with it: a value that fits none of several types has an entry for each."""
    path = [str(part) for part in entry["loc"]]
    # loc is (key, entries ..., branch of the union): ("rope_scaling", "factor", "float").
    while len(path) > 1 and _BRANCH.fullmatch(path[-1]):
        path.pop()
    key = path[0] if path else ""
    origin = origins.get(key, "default")
    if entry["type"] == "extra_forbidden" and len(path) == 1:
        return unknown_key(section, key, origin, sections, type_, other_types), ""
    dotted = ".".join([section, *path])
    if entry["type"] == "missing":
        return f"{dotted} is missing; set it in the file or with --set {dotted}=...", ""
    if entry["type"] == "value_error":
        return f"{dotted} (from {origin}): ", str(entry["ctx"]["error"])
    expected = _EXPECTED.get(entry["type"])
    what = f"expected {expected}" if expected else entry["msg"][0].lower() + entry["msg"][1:]
    return f"{dotted} (from {origin}): got {entry['input']!r}, ", what


def unknown_section(section: str, origin: str, sections: Mapping[str, type[Section]]) -> str:
    """A section that does not exist: where it belongs, or what it resembles."""
    home = SECTIONS.homes.get(section)
    # --set seq_length.x=1: the name of a key stands where a section belongs.
    homes = [name for name, base in sections.items() if section in base.model_fields]
    hint = f"; {section} is a key of [{homes[0]}]: write {homes[0]}.{section}" if homes else ""
    if home is not None:
        # find_spec imports nothing of a top-level package.
        is_installed = find_spec(home.replace("-", "_")) is not None
        remedy = "which is installed and not loaded: mt plugins says why" if is_installed else f"pip install {home}"
        hint = f"; it is a section of {home} ({remedy})"
    hint = hint or did_you_mean(section, [*sections, "preset"])
    return f"unknown section {section} (from {origin}){hint}; sections are {', '.join(sections)}"


def unknown_key(
    section: str,
    key: str,
    origin: str,
    sections: Mapping[str, type[Section]],
    type_: type[Section] | None = None,
    other_types: Mapping[str, type[Section]] | None = None,
) -> str:
    """A key that does not exist: where it belongs, or what it resembles. type_: of the section; None where nothing is
    selected, so that it resembles a key of any of the other types."""
    types = [type_] if type_ else [sections[section], *(other_types or {}).values()]
    hint = did_you_mean(key, dict.fromkeys(field for section_type in types for field in section_type.model_fields))
    # The most helpful hint wins: a similar key, then another selection, another section, Megatron's word.
    if able := [name for name, other in (other_types or {}).items() if key in other.model_fields]:
        selector = f"{section}.{sections[section].selector}"
        names = " or ".join(part for part in (", ".join(able[:-1]), able[-1]) if part)
        hint = f"; it is a key where {selector} is {names}"
    homes = [name for name, base in sections.items() if key in base.model_fields and name != section]
    if split := key_in_section(key, sections):
        hint = f"; it is a key of [{split.partition('.')[0]}]: write {split}"
    elif homes:
        hint = f"; it is a key of [{homes[0]}]: write {homes[0]}.{key}"
    if key in MEGATRON_KEYS:
        hint = f"; {MEGATRON_KEYS[key]}"
    return f"unknown key {section}.{key} (from {origin}){hint}"


def key_in_section(key: str, sections: Mapping[str, type[Section]]) -> str | None:
    """wandb.project for wandb_project: Megatron and Accelerate write the name of a tracker into the key."""
    section, _, rest = key.partition("_")
    return f"{section}.{rest}" if section in sections and rest in sections[section].model_fields else None
