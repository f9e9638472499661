"""Where the code of environments and tools is, in a form that another process can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mt_tune.environments.dialogues import DialogueSource
from mt_tune.environments.sources import SourcesByName
from mt_tune.environments.tool_dialogues import ToolDialogues
from mt_tune.rewards.references import FunctionReference


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
