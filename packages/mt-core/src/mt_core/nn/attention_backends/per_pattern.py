"""What a backend derives from an attention pattern, made once though many layers use it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from mt_core.nn.attention import AttentionPattern

T = TypeVar("T")


class PerPattern(Generic[T]):
    """Values by pattern (the object, not its content) and a key; they go when their pattern goes."""

    def __init__(self) -> None:
        # By id: a dataclass that compares by value has no hash, so it cannot be a key of a WeakKeyDictionary.
        self._known: dict[int, tuple[weakref.ref[AttentionPattern], dict[Hashable, T]]] = {}

    def get(self, pattern: AttentionPattern, key: Hashable, make: Callable[[], T]) -> T:
        values = self._values(pattern)
        if key not in values:
            values[key] = make()
        return values[key]

    def _values(self, pattern: AttentionPattern) -> dict[Hashable, T]:
        found = self._known.get(id(pattern))
        # An id may be used again by a new pattern before the callback of the old one has run; replacing the entry drops
        # the old reference and its callback.
        if found is None or found[0]() is not pattern:
            found = self._known[id(pattern)] = (weakref.ref(pattern, self._forget(id(pattern))), {})
        return found[1]

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._known.pop(key, None)

        return forget
