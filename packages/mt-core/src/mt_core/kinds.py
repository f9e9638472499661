"""What the contract is made of: `Lazy` references to code, the base of all specs, and `Kind`.

A spec is what a plugin registers. It is cheap: it names its owner's code by `Lazy("module:attribute")` and imports it
only when it is used, so that listing plugins never imports torch.

A `Kind` is the only declaration that a kind of thing needs: its hook, its registry (`host[MODELS]`) and its messages
follow from it. Those of mt-core stand under their specs; a distribution declares more by the hook `mt_declare_kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")
HOOK_PREFIX = "mt_register_"


class Lazy(Generic[T]):
    """An object of a plugin's code, imported at the first `load()`.

    Written in code by the plugin's author, as an entry point is; configuration never holds one.
    """

    def __init__(self, reference: str) -> None:
        module, _, attribute = reference.partition(":")
        if not module or not attribute:
            raise ValueError(f'a Lazy reference reads "package.module:attribute", got {reference!r}')
        self.reference = reference

    def load(self) -> T:
        module, _, attribute = self.reference.partition(":")
        return getattr(import_module(module), attribute)

    def __repr__(self) -> str:
        return f"Lazy({self.reference!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and other.reference == self.reference

    def __hash__(self) -> int:
        return hash(self.reference)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A registered thing: `name` is what configuration selects it by, `doc` one line that lists show."""

    name: str
    doc: str
    aliases: tuple[str, ...] = ()
    """Names that it has elsewhere. One that no other spec has, as name or alias, is taken with a note."""


SpecT = TypeVar("SpecT", bound=Spec)


@dataclass(frozen=True)
class Kind(Generic[SpecT]):
    """One kind of thing that plugins register: the key of its registry, `host[kind]`.

    name: plural; the hook of the kind is `mt_register_` with it. title: singular, with its article, for messages. home:
    the distribution that brings mt's own ones, which messages say how to install. homes: names that live in another
    distribution than `home`. What the hook registers is said by the docstring of the spec.
    """

    name: str
    title: str
    spec_type: type[SpecT]
    home: str
    homes: Mapping[str, str] = field(default_factory=dict)

    @property
    def hook(self) -> str:
        return HOOK_PREFIX + self.name

    def __hash__(self) -> int:
        return hash((self.name, self.spec_type))
