"""Environments that plugins register by `mt_register_environments`; rl.environments selects them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mt_core.kinds import Kind, Lazy, Spec
from mt_tune.environments.dialogues import DialogueSource


class BuildEnvironment(Protocol):
    def __call__(self, options: Mapping[str, Any]) -> DialogueSource:
        """options: rl.environment_options of the environment. Raises ConfigError for unknown or missing ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(Spec):
    """The other side of conversations, selected by `rl.environments`. Its module is imported in the process from which
    those of conversations are forked."""

    build: Lazy[BuildEnvironment]


ENVIRONMENTS = Kind("environments", "an environment", EnvironmentSpec, "mt-tune")
