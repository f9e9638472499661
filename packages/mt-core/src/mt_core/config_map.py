"""Declarations of how a family's configuration stands in an external format's, read in both directions.

Every field of the external configuration is mapped, or named with the reason why it does not matter, or an
error: a field that is dropped in silence is a model that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_core.errors import ConfigError


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """One key there, one key of [model] here.

    to_ours, to_theirs: translate the value. default: the external default when the key is absent.
    """

    theirs: str
    ours: str
    to_ours: Callable[[Any], Any] = unchanged
    to_theirs: Callable[[Any], Any] = unchanged
    default: Any = None


@dataclass(frozen=True)
class Fixed:
    """A key there that can only have these values, since the family means them. The first is written."""

    theirs: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class ConfigMap:
    """The configuration of one family in one external format."""

    architecture: str
    """How the format names the family: `model_type` for Hugging Face."""
    fields: tuple[Field, ...]
    fixed: tuple[Fixed, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Key -> why it changes nothing that is computed."""
    further: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Keys of [model] that depend on several external ones; receives the whole external configuration."""
    further_keys: tuple[str, ...] = ()
    """External keys that `further` reads."""
    further_back: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """The way back: external keys from the whole of [model]."""

    def to_ours(self, external: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of [model]. Raises ConfigError for a field that is unknown or has a value that is not supported."""
        known = {f.theirs for f in self.fields} | {f.theirs for f in self.fixed} | {*self.ignored, *self.further_keys}
        unknown = sorted(set(external) - known)
        if unknown:
            raise ConfigError(
                f"the configuration of this {self.architecture} has fields that are not known: "
                f"{', '.join(f'{key}={external[key]!r}' for key in unknown)}"
            )
        for entry in self.fixed:
            if entry.theirs in external and external[entry.theirs] not in entry.values:
                legal = " or ".join(repr(value) for value in entry.values)
                raise ConfigError(f"{entry.theirs}={external[entry.theirs]!r} is not supported; it can be {legal}")
        values = {f.ours: f.to_ours(external.get(f.theirs, f.default)) for f in self.fields}
        if self.further is not None:
            values.update(self.further(external))
        return {key: value for key, value in values.items() if value is not None}

    def to_theirs(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """The external configuration of a [model] section with every key present."""
        values = {f.theirs: f.to_theirs(model.get(f.ours)) for f in self.fields}
        values.update({entry.theirs: entry.values[0] for entry in self.fixed})
        if self.further_back is not None:
            values.update(self.further_back(model))
        return values


def require_known(kind: str, value: str, allowed: Iterable[str]) -> str:
    """`value`, or ConfigError with the values that are supported."""
    names = list(allowed)
    if value not in names:
        raise ConfigError(f"{kind}={value!r} is not supported; it can be {', '.join(names)}")
    return value
