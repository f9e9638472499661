"""Limits on what a pickle may describe, so that a small file cannot ask for endless work.

A pickle names an object as often as it likes: thirty lists, each holding the one before it twice, are a billion entries
to whoever walks through them, and a list may hold itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from mt_ckpt.pickles.inert_objects import Inert
from mt_core.errors import CheckpointError

MAX_DEPTH = 200
"""Containers within containers. Checkpoints have about ten; Python's own functions fail at a thousand."""
FREE_ENTRIES = 1_000_000
ENTRIES_PER_ENTRY = 64
"""Walking through an object may meet so many times the entries that the pickle holds, and FREE_ENTRIES in any case."""
_LEAVES = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset, Inert)


def check_structure(value: Any, origin: str) -> None:
    """Raises CheckpointError for an object that contains itself, is nested too deeply, or is endless to walk through.

    origin: the file, for the message. Each container is looked at once, however often it is named.
    """
    if isinstance(value, _CONTAINERS):
        _Walk(origin).measure(value)


class _Walk:
    def __init__(self, origin: str) -> None:
        self._origin = origin
        # Ids are valid keys: `root` keeps every container alive during the walk.
        self._heights: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Of each container done, by id: levels in it, and entries that a walk through it meets."""
        self._entries = 0

    def measure(self, root: Any) -> None:
        # Depth-first with a stack of its own: Python's recursion would end at about a thousand levels.
        path: list[tuple[Any, list[Any], Iterator[Any]]] = []
        on_path: set[int] = set()

        def enter(container: Any) -> None:
            # The limit on the way down; `_finish` repeats it for containers that were measured on another, shorter
            # path.
            if len(path) == MAX_DEPTH:
                raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep")
            inner = _containers_in(container)
            if not inner:
                self._finish(container, inner)
                return
            path.append((container, inner, iter(inner)))
            on_path.add(id(container))

        enter(root)
        while path:
            container, inner, rest = path[-1]
            # A child that is done is not entered again, so the walk is linear in the number of containers. rest keeps
            # its position between two passes.
            child = next((child for child in rest if id(child) not in self._sizes), None)
            if child is None:
                path.pop()
                on_path.discard(id(container))
                self._finish(container, inner)
            elif id(child) in on_path:
                raise self._refusal("contains itself")
            else:
                enter(child)

    def _finish(self, container: Any, inner: list[Any]) -> None:
        count = 3 if isinstance(container, Inert) else len(container)
        self._entries += count
        height = 1 + max((self._heights[id(child)] for child in inner), default=0)
        # Entries with repetitions: may be exponential in the number of containers, which Python's integers hold.
        size = count + sum(self._sizes[id(child)] for child in inner)
        if height > MAX_DEPTH:
            raise self._refusal(f"is nested more than {MAX_DEPTH} levels deep")
        if size > FREE_ENTRIES + ENTRIES_PER_ENTRY * self._entries:
            raise self._refusal(f"repeats {self._entries} entries until they are {size:.2g}")
        self._heights[id(container)], self._sizes[id(container)] = height, size

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._origin}: refused: the object in it {what}, which no checkpoint does")


def _containers_in(container: Any) -> list[Any]:
    entries: Iterable[Any] = container
    if isinstance(container, Inert):
        entries = (container.arguments, container.attributes, container.items)
    elif isinstance(container, dict):
        entries = chain(container, container.values())
    # Most entries are of these types, which are found without a search through the kinds of containers.
    return [entry for entry in entries if type(entry) not in _LEAVES and isinstance(entry, _CONTAINERS)]
