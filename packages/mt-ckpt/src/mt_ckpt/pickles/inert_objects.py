"""Stand-ins for objects of classes that are not loaded: they keep what a pickle says of them and do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Inert:
    """An object of some class of another program.

    arguments: what it was made with. attributes: what it was given afterwards. items: what was put into it, if it
    is a list or a mapping.
    """

    __slots__ = ("arguments", "attributes", "items")
    arguments: tuple[Any, ...]
    attributes: dict[Any, Any]
    items: list[Any]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Inert:
        # NEWOBJ calls __new__ without __init__, REDUCE calls the class: both have to fill the slots.
        instance = object.__new__(cls)
        instance.arguments, instance.attributes, instance.items = arguments, dict(keywords), []
        return instance

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Everything is done by __new__, which is all that pickles call for some objects."""

    def __setstate__(self, state: Any) -> None:
        # A pair is (__dict__, slots) by the protocol of objects with __slots__. Either may be None.
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.attributes.update(part)
            elif part is not None:
                # A state that is no mapping, such as numpy's (version, shape, dtype, ...) or TensorProperties' tuple.
                self.arguments = state if isinstance(state, tuple) else (state,)

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        kind = type(self)
        return f"<{kind.__module__}.{kind.__qualname__}{self.arguments!r}>"


def inert_class(module: str, name: str) -> type[Inert]:
    """A class of its own for `module.name`, so that nothing in one pickle reaches another."""
    return type(name, (Inert,), {"__module__": module, "__slots__": ()})


def plain(value: Any) -> Any:
    """`value` as JSON: fakes and everything else that JSON does not have become text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    return str(value)
