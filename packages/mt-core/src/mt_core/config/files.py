"""Reads configuration files (TOML, JSON, YAML, by the ending of the name) within limits, and writes values as TOML."""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_core.config.layers import Layer
from mt_core.errors import ConfigError
from mt_core.json_objects import parse_json

# -- YAML 1.2: no tags that make objects, no duplicate keys, bounded nesting and aliases -------------

MAX_YAML_DEPTH = 32
MAX_NODES = 100_000
"""Nodes with each alias counted as what it stands for: an alias of aliases of aliases multiplies ("billion laughs")."""


def parse_yaml(text: str) -> Any:
    """Raises ValueError for text that is no YAML or beyond the limits, ConfigError if no parser is installed."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
    except ImportError:
        raise ConfigError('YAML files need ruamel.yaml: pip install "mt-core[yaml]"; or write TOML or JSON') from None
    # Events come one by one without recursion, so that the limits hold before anything is built.
    try:
        require_small(YAML(typ="safe", pure=True).parse(text))
        # A second parser: the first one is used up by its events.
        values = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        if isinstance(error, MarkedYAMLError):
            error.note = None  # how to turn a check of ruamel.yaml off in Python
        raise ValueError(str(error)) from error
    _require_text_keys(values)
    return {} if values is None else values


def require_small(events: Iterable[Any]) -> None:
    """Raise ValueError for a document that is nested too deep, too large with its aliases, or contains itself."""
    from ruamel.yaml import events as kinds

    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, nodes inside so far) from the root inwards
    for event in events:
        if isinstance(event, kinds.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > MAX_YAML_DEPTH:
                raise ValueError(f"nested more than {MAX_YAML_DEPTH} deep{event.start_mark}")
            continue
        anchor, size = None, 0
        if isinstance(event, kinds.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor} stands inside of itself, or is not defined{event.start_mark}")
            size = sizes[event.anchor]
        elif isinstance(event, kinds.ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, kinds.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        # Known from its end on: an alias inside of its own node is refused above.
        if anchor is not None:
            sizes[anchor] = size
        # Sizes add up from the innermost node outwards; an alias counts its node again.
        outer, inside = open_nodes[-1]
        open_nodes[-1] = (outer, inside + size)
        if inside + size > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values once its aliases are written out{event.start_mark}")


def _require_text_keys(values: Any) -> None:
    for entry in values if isinstance(values, list) else ():
        _require_text_keys(entry)
    for key, entry in values.items() if isinstance(values, dict) else ():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is no text; put it in quotes")
        _require_text_keys(entry)


# -- limits on a configuration, so that an absurd file ends in an error message and not in endless work ---

MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 50
TOO_DEEP = f"tables and lists are nested more than {MAX_DEPTH} levels deep; no key of a configuration is"
# Possessive quantifiers (++, *+): without backtracking the search is linear in the text.
_LONG_KEY = re.compile(r"(?<![\w.-])(?:[\w-]++\s*+\.\s*+){50}")


def refuse_long_keys(text: str) -> None:
    """Raises ValueError for keys of 50 parts and more, which tomllib reads in quadratic time."""
    if _LONG_KEY.search(text):
        raise ValueError(TOO_DEEP)


def require_depth(values: Any) -> None:
    """Raises ValueError for tables and lists in more than MAX_DEPTH levels."""
    # A stack of its own: recursion would end in RecursionError for the values that this refuses.
    waiting = [(values, MAX_DEPTH)]
    while waiting:
        value, levels = waiting.pop()
        if not isinstance(value, Mapping | list):
            continue
        if not levels:
            raise ValueError(TOO_DEEP)
        entries = value.values() if isinstance(value, Mapping) else value
        waiting.extend((entry, levels - 1) for entry in entries)


BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    # Before those of UTF-16, which begin alike.
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""First bytes of a file -> its encoding, as editors and PowerShell on Windows write it."""
_TOML_TWICE = re.compile(r"Cannot (?:overwrite a value|declare .* twice|mutate immutable .*) \(at line (\d+)")
_TOML_TABLE = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]")
_TOML_KEY = re.compile(r"\s*([\w.\-\"']+(?:\s*\.\s*[\w\-\"']+)*)\s*=")


def read_config_file(path: Path) -> tuple[str | None, Layer]:
    """The preset that the file names, if it does, and its values. Raises ConfigError for a file that cannot be read."""
    values = read_values(path)
    if values is None:  # an empty YAML file
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: got a {type(values).__name__}, expected sections with keys")
    preset = values.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        raise ConfigError(f"config file {path}: preset is {preset!r}, expected the name of a preset")
    return preset, Layer(f"file {path.name}", values)


def read_values(path: Path) -> Any:
    """What a file holds, by the ending of its name. Raises ConfigError for one that cannot be read."""
    try:
        return _decode(path)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except ValueError as error:  # UnicodeDecodeError and the parsers' errors are ValueErrors
        raise ConfigError(f"config file {path}: {str(error) or type(error).__name__}") from error
    except RecursionError:
        raise ConfigError(f"config file {path}: {TOO_DEEP}") from None


def _decode(path: Path) -> Any:
    """What a file holds. Raises OSError, ValueError, and RecursionError for values within values without end."""
    # Before the file is read: a checkpoint given by mistake has gigabytes.
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it has {path.stat().st_size} bytes, and no configuration has more than {MAX_FILE_BYTES}")
    parse = PARSERS.get(path.suffix.lower(), _parse_toml)
    values = parse(_text(path.read_bytes()))
    require_depth(values)
    return values


def _text(data: bytes) -> str:
    """The text of a file in UTF-8, or in the encoding that its byte order mark names. Raises ValueError."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is no {encoding.removesuffix('-sig').upper()} ({error.reason}); save the file as UTF-8"
        ) from error


def _parse_json(text: str) -> Any:
    # An empty file is one without keys, as in TOML.
    if not text.strip():
        return {}
    return parse_json(text)


def _parse_toml(text: str) -> Any:
    refuse_long_keys(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if twice := _TOML_TWICE.match(str(error)):
            line = int(twice[1])
            name = _toml_name(text.split("\n")[:line])
            raise ValueError(f"{name} stands twice, again in line {line}; keep one of the two") from error
        raise


def _toml_name(lines: list[str]) -> str:
    """The table, or the key with its table, that the last of these lines belongs to."""
    key = None
    for line in reversed(lines):
        if table := _TOML_TABLE.match(line):
            return f"{table[1]}.{key}" if key else f"the table [{table[1]}]"
        if key is None and (key_match := _TOML_KEY.match(line)):
            key = key_match[1]
    return key or lines[-1].strip()


PARSERS: Mapping[str, Callable[[str], Any]] = {".json": _parse_json, ".yaml": parse_yaml, ".yml": parse_yaml}
"""File ending -> parser, which raises ValueError. Files with other endings are TOML."""


# -- writing TOML, which the standard library only reads ---------------------------------------------

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(value: Any) -> str:
    """One value on one line, tables as inline tables. Raises ValueError for null, which TOML does not have."""
    if value is None:
        raise ValueError("TOML has no null")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also expects DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        entries = ", ".join(f"{_key(key)} = {to_toml(entry)}" for key, entry in value.items() if entry is not None)
        return f"{{{entries}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    return repr(value)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else to_toml(key)


def shown(value: Any) -> str:
    """A value for people: as TOML, and null where there is none."""
    try:
        return to_toml(value) if value is not None else "null"
    except ValueError:
        return json.dumps(value)
