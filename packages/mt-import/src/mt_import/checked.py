"""Whether an imported configuration is one that training takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mt_core.config.checks import as_world
from mt_core.config.loading import LoadedConfig, load_config, load_config_anywhere
from mt_core.plugins import PluginHost
from mt_import.result import ImportResult

NAME = "imported.json"
GPU_DISPATCHER = "flex"
"""Sends tokens by DeepEP or HybridEP."""


def check_configuration(
    sections: Mapping[str, Mapping[str, Any]], world_size: int | None, host: PluginHost
) -> LoadedConfig:
    """Load it as training would, for so many processes; None: as many as its layout needs. Raises ConfigError.

    A dispatcher whose library is built for GPUs is checked as an all-to-all: it need not be installed here.
    """
    # From a file, so that the messages are those that training would give.
    with TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.write_text(json.dumps(_without_gpu_libraries(sections)), encoding="utf-8")
        if world_size is None:
            return load_config_anywhere(path, host=host)
        with as_world(world_size):
            return load_config(path, host=host)


def _without_gpu_libraries(sections: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    moe = sections.get("model", {}).get("moe") or {}
    if moe.get("moe_token_dispatcher_type") != GPU_DISPATCHER:
        return sections
    kept = {key: value for key, value in moe.items() if key != "moe_dispatcher_options"}
    model = {**sections["model"], "moe": {**kept, "moe_token_dispatcher_type": "alltoall"}}
    return {**sections, "model": model}


def check_result(result: ImportResult, host: PluginHost) -> None:
    """Raises ConfigError for a configuration that training would refuse. Of a part of one its sections are checked."""
    if result.complete:
        check_configuration(result.sections, result.processes.world_size, host)
