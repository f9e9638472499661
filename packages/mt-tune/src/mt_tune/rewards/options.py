"""Options of registered rewards: dataclasses whose fields are the options, read with their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from mt_core.errors import ConfigError, DataError, did_you_mean

OptionsT = TypeVar("OptionsT")


def read_options(type_: type[OptionsT], reward: str, options: Mapping[str, Any]) -> OptionsT:
    """An instance of the dataclass. Raises ConfigError for unknown options, missing ones and other types."""
    known = {field.name: field for field in fields(type_)}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"the reward {reward} has no option {name}{did_you_mean(name, known)}; {has}")
    for name, field in known.items():
        if name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"the reward {reward} needs the option {name}: set rewards.options.{reward}.{name}")
    hints = get_type_hints(type_)
    for name, value in options.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"rewards.options.{reward}.{name}={value!r} must be of type {_shown(hints[name])}")
    return type_(**options)


def column(columns: Mapping[str, Any], name: str, reward: str) -> Sequence[Any]:
    """A column of the rows. Raises DataError where they do not have it."""
    if name in columns:
        return columns[name]
    rows = [key for key in columns if key not in GIVEN]
    raise DataError(f"the rows have no column {name} for the reward {reward}; they have {', '.join(rows) or 'none'}")


GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Keyword arguments of reward functions that are no columns."""


def _fits(value: Any, hint: Any) -> bool:
    types = get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, tuple(types)) or (float in types and isinstance(value, int))


def _shown(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))
