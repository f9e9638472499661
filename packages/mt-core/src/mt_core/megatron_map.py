"""Declaration of how a model family stands among Megatron-Core's arguments: `ModelSpec.name_maps["megatron"]`.

Megatron's checkpoints carry the arguments of their run, which say what the model is. Parameters need no map: canonical
names and layouts are Megatron-Core's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = "megatron"
"""The key of `name_maps`."""
WriteArguments = Callable[[Any, Collection[str], Mapping[str, Any]], dict[str, Any]]
"""(the [model] configuration, canonical names of its parameters, arguments that came from Megatron) -> arguments.

Raises ConfigError, naming the key, for a model that Megatron does not have."""
ReadSection = Callable[[Mapping[str, Any], Collection[str]], dict[str, Any] | None]
"""(arguments of a checkpoint, canonical names of its parameters) -> keys of [model] but `family` and `vocab_size`;
None: a model of another family. Raises ConfigError, naming the argument, for a model that cannot be."""


@dataclass(frozen=True, kw_only=True)
class MegatronMap:
    """How one family stands among Megatron-Core's arguments.

    arguments: writes them; a string names one of the sets of arguments that mt-ckpt writes ("gpt", "rotary", ...).
    section: reads them; None for families of these sets, which mt-ckpt distinguishes.
    unsupported: why Megatron has no such model, in place of both.
    """

    arguments: WriteArguments | str | None = None
    section: ReadSection | None = None
    unsupported: str | None = None
