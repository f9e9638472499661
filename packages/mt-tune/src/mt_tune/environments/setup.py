"""Environments and tools by their names in the configuration: where their code is, in a form that another process can
load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import PluginHost
from mt_tune.environments.dialogues import DialogueSource, SourcesByName
from mt_tune.environments.environment_specs import ENVIRONMENTS
from mt_tune.environments.tool_dialogues import ToolDialogues
from mt_tune.rewards.references import FunctionReference, module_reference

ENVIRONMENTS_KEY, TOOLS_KEY = "rl.environments", "rl.tools"


@dataclass(frozen=True)
class EnvironmentReference:
    """A registered environment's `build`, which takes the options, or a class or function whose keyword arguments they
    are: TRL's environment_factory, or a class that implements DialogueSource."""

    reference: FunctionReference
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceSetup:
    """What a process imports. environments: by the names that rows choose them by, the only one under None. tools:
    functions that the model may call, beside the methods of environments that factories make."""

    environments: Mapping[str | None, EnvironmentReference]
    tools: Sequence[FunctionReference] = ()

    def load(self) -> SourcesByName:
        """Raises whatever the code raises that is imported."""
        tools = [reference.load() for reference in self.tools]
        if not self.environments:
            return SourcesByName({None: ToolDialogues(tools, None)})
        return SourcesByName({name: self._loaded(entry, tools) for name, entry in self.environments.items()})

    def _loaded(self, entry: EnvironmentReference, tools: Sequence[Any]) -> DialogueSource:
        if entry.reference.registered:
            source: DialogueSource = entry.reference.value()(entry.options)
            return source
        factory = entry.reference.load()
        if hasattr(factory, "begin"):
            dialogues: DialogueSource = factory(**entry.options)
            return dialogues
        return ToolDialogues(tools, partial(factory, **entry.options) if entry.options else factory)


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
    return SourceSetup(dict(named.items()), references)


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
