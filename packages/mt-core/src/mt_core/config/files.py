"""Reads a configuration file: TOML, JSON or YAML, by the ending of its name."""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_core.config.layers import Layer
from mt_core.config.limits import MAX_FILE_BYTES, TOO_DEEP, refuse_long_keys, require_depth
from mt_core.config.yaml_text import parse_yaml
from mt_core.errors import ConfigError

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
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that stands twice, of which Python's reader keeps the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object; keep one of the two")
        found[key] = value
    return found


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
        if key is None and (found := _TOML_KEY.match(line)):
            key = found[1]
    return key or lines[-1].strip()


PARSERS: Mapping[str, Callable[[str], Any]] = {".json": _parse_json, ".yaml": parse_yaml, ".yml": parse_yaml}
"""File ending -> parser, which raises ValueError. Files with other endings are TOML."""
