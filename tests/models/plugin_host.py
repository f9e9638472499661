"""The plugins of this process, for functions that run on ranks, where there are no fixtures."""

from __future__ import annotations

from functools import cache

from mt_core.plugins import PluginHost, load_plugins


@cache
def host() -> PluginHost:
    return load_plugins()
