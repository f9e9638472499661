"""Detects the kind of a file or folder, and imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mt_core.config.files import read_values
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_tools.config_import.accelerate import import_accelerate, is_accelerate
from mt_tools.config_import.bridge import import_bridge, is_bridge
from mt_tools.config_import.megatron import MegatronOptions, import_script, import_words
from mt_tools.config_import.megatron_checkpoint import import_checkpoint
from mt_tools.config_import.result import ImportResult

FILES = (".yaml", ".yml", ".json")
FUNCTIONAL_TEST = "MODEL_ARGS"
"""Map of Megatron's own functional tests: option with its dashes -> value, true for a flag."""


def import_file(
    path: Path,
    host: PluginHost,
    *,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    options: MegatronOptions | None = None,
) -> ImportResult:
    """A launch script, a YAML file, or a checkpoint. define, arguments: of a script. Raises ConfigError."""
    options = options or MegatronOptions()
    if not path.exists():
        raise ConfigError(f"{path} does not exist; mt import takes a launch script, a YAML file or a checkpoint")
    if path.is_dir():
        return import_checkpoint(path, host, options)
    if path.suffix.lower() in FILES:
        return _import_values(read_values(path), path, host, options)
    return import_script(path, host, define=define, arguments=arguments, options=options)


def _import_values(values: Any, path: Path, host: PluginHost, options: MegatronOptions) -> ImportResult:
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, expected keys and values")
    # From the most specific mark to the least.
    if is_accelerate(values):
        return import_accelerate(values, path.name)
    if isinstance(found := values.get(FUNCTIONAL_TEST), dict):
        return import_words(list(_words(found)), host, options)
    if is_bridge(values):
        return import_bridge(values, path.name, host, options)
    raise ConfigError(
        f"{path} is neither Accelerate's (distributed_type, megatron_lm_config), nor Megatron-Bridge's or NeMo's "
        f"(model with trainer, train or optimizer), nor a test of Megatron's ({FUNCTIONAL_TEST}); its keys are "
        f"{', '.join(map(str, list(values)[:8]))}"
    )


def _words(values: Mapping[str, Any]) -> list[str]:
    """true is a flag, false leaves it out, anything else is the text of the values."""
    words: list[str] = []
    for option, value in values.items():
        if value is not False:
            words += [option] if value is True else [option, *str(value).split()]
    return words
