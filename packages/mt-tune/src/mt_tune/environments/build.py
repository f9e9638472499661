"""Environments and tools by their names in the configuration: registered ones, and those of the user's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import PluginHost
from mt_tune.environments.environment_specs import ENVIRONMENTS
from mt_tune.environments.setup import EnvironmentReference, SourceSetup
from mt_tune.rewards.build import module_reference
from mt_tune.rewards.references import FunctionReference

ENVIRONMENTS_KEY, TOOLS_KEY = "rl.environments", "rl.tools"


def source_setup(
    environments: Sequence[str],
    tools: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    modules: Sequence[str],
    host: PluginHost,
) -> SourceSetup:
    """Where the code is that the keys name. Nothing is imported.

    Raises PluginError for a name that no plugin registers, ConfigError for a module that rewards.modules lacks, for
    options without an environment, and for tools beside a registered environment.
    """
    named = dict(_environment(text, options, modules, host) for text in environments)
    if len(named) < len(environments):
        raise ConfigError(f'{ENVIRONMENTS_KEY}={list(environments)}: name one of two alike as "LABEL=NAME"')
    for name in options:
        if name not in named:
            raise ConfigError(
                f"rl.environment_options.{name}: {ENVIRONMENTS_KEY} has no {name}{did_you_mean(name, named)}"
            )
    if tools and (registered := [name for name, entry in named.items() if entry.reference.registered]):
        raise ConfigError(f"{TOOLS_KEY} are those of classes and functions; {registered[0]} has what it needs itself")
    references = [_tool(text, modules) for text in tools]
    # One environment takes all rows; the column `environment` of a row chooses one of several.
    if len(named) == 1:
        return SourceSetup({None: next(iter(named.values()))}, references)
    return SourceSetup({**named}, references)


def _environment(
    text: str, options: Mapping[str, Mapping[str, Any]], modules: Sequence[str], host: PluginHost
) -> tuple[str, EnvironmentReference]:
    label, _, name = text.rpartition("=")
    if "." not in name and ":" not in name:
        spec = host[ENVIRONMENTS].get(name, key=ENVIRONMENTS_KEY)
        module, _, attribute = spec.build.reference.partition(":")
        reference, label = FunctionReference(module, attribute, registered=True), label or name
    else:
        reference = module_reference(name, modules, ENVIRONMENTS_KEY)
        label = label or reference.attribute.rpartition(".")[2]
    return label, EnvironmentReference(reference, options.get(label, {}))


def _tool(text: str, modules: Sequence[str]) -> FunctionReference:
    if "." not in text and ":" not in text:
        raise ConfigError(f'{TOOLS_KEY}: "{text}" must read MODULE:FUNCTION, of a module of rewards.modules')
    return module_reference(text, modules, TOOLS_KEY)
