"""Names that keys have in other software, which plugins register by `mt_register_key_names`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mt_core.kinds import Kind, Lazy, Spec


class KeyNames(Protocol):
    def __call__(self) -> Mapping[str, Sequence[str]]:
        """Dotted key -> what it is called there."""
        ...


class ExplainName(Protocol):
    def __call__(self, name: str) -> str | None:
        """A sentence about a name that stands for no key; None: there is no such name."""
        ...


@dataclass(frozen=True, kw_only=True)
class KeyNamesSpec(Spec):
    """Names that keys of the configuration have in other software, which `mt config explain` shows and takes."""

    names: Lazy[KeyNames]
    explain: Lazy[ExplainName] | None = None


KEY_NAMES = Kind("key_names", "a set of names of keys", KeyNamesSpec, "mt-import")
