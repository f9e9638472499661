"""Tells what a file or folder is, and imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_tools.config_import.megatron import MegatronOptions, import_script
from mt_tools.config_import.result import ImportResult


def import_file(
    path: Path,
    host: PluginHost,
    *,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    options: MegatronOptions | None = None,
) -> ImportResult:
    """A launch script, a YAML file, or a checkpoint. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; mt import takes a launch script, a YAML file or a checkpoint")
    return import_script(path, host, define=define, arguments=arguments, options=options)
