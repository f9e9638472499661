"""Reads a configuration file: TOML, JSON or YAML, by the ending of its name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_core.config.layers import Layer
from mt_core.config.limits import MAX_FILE_BYTES, TOO_DEEP, refuse_long_keys, require_depth
from mt_core.config.yaml_text import parse_yaml
from mt_core.errors import ConfigError

PARSERS: Mapping[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": parse_yaml, ".yml": parse_yaml}
"""File ending -> parser, which raises ValueError. Files with other endings are TOML."""


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
    text = path.read_text(encoding="utf-8")
    parse = PARSERS.get(path.suffix.lower(), _parse_toml)
    values = parse(text)
    require_depth(values)
    return values


def _parse_toml(text: str) -> Any:
    refuse_long_keys(text)
    return tomllib.loads(text)
