"""What commands get from `mt` beside their arguments."""

from __future__ import annotations

import os

import typer

from mt_core.plugins import STRICT_VARIABLE, PluginHost, load_plugins


def host_of(context: typer.Context) -> PluginHost:
    """The host that `mt` was built from; loaded anew where a command runs by itself."""
    return context.find_object(PluginHost) or load_plugins(strict=False)


def is_strict() -> bool:
    """Whether MT_PLUGINS_STRICT asks for an error in place of a missing plugin."""
    return os.environ.get(STRICT_VARIABLE, "") not in ("", "0")
