"""The hooks of mt. A plugin is a module named under the entry-point group `mt` that implements some of them:

    # pyproject.toml                          # my_plugin/plugin.py
    [project]                                 from mt_core import Lazy, TokenizerSpec, hookimpl
    dependencies = ["mt-core>=0.1,<0.2"]
    [project.entry-points.mt]
    my-plugin = "my_plugin.plugin"            @hookimpl
                                              def mt_register_tokenizers():
                                                  return [TokenizerSpec(name="mine", ...)]

Each kind of thing (`mt_core.specs`, and those that `mt_declare_kinds` of any plugin returns) has the hook
`mt_register_` with the kind's name, which takes no arguments and returns a list of the kind's specs.

Implementations may take fewer arguments than the hook has; hooks only ever gain arguments.
A plugin module should import nothing heavy: specs point to code with `Lazy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mt_core.kinds import Kind

PROJECT = "mt"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of the functions by which a plugin implements hooks."""


@hookspec
def mt_declare_kinds() -> list[Kind[Any]]:
    """Kinds of things that this distribution asks plugins for, beside those of mt-core."""
    raise NotImplementedError


@hookspec
def mt_check_config(config: Any, host: Any) -> None:
    """Look at the resolved configuration (a mt_core.config.Config) before any process group exists, and raise
    ConfigError for one that cannot work. host: the PluginHost."""
