"""The callback of adapters, for runs that have some: others import nothing of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.config.schema import Config
from mt_tune.adapters.config import AdapterConfig, has_adapter

if TYPE_CHECKING:
    from mt_tune.adapters.start import AdapterStart


def build_adapter_start(config: Config) -> AdapterStart | None:
    """None for a run without adapters."""
    if not has_adapter(config):
        return None
    from mt_tune.adapters.start import AdapterStart

    return AdapterStart(config.section(AdapterConfig))
