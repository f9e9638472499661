"""The name that scripts import from `accelerate.parallelism_config`."""

from __future__ import annotations

from typing import Any

from mt_accelerate.refused_names import LAYOUTS
from mt_core.errors import ConfigError


class ParallelismConfig:
    """Raises ConfigError when it is made."""

    def __init__(self, **sizes: Any) -> None:
        raise ConfigError(f"ParallelismConfig({', '.join(sizes)}): {LAYOUTS}; its sizes are fields of the plugin")
