"""The tensors nested in the arguments of a layer: finding, describing and replacing them.

Arguments may be tensors, constants, and tuples, lists, dictionaries and plain objects of these (an attention pattern,
rotary angles). Attributes that begin with an underscore are caches of the object and are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
Form = tuple[tuple[object, ...], ...]
"""Everything about the arguments but the values of their tensors. Calls with equal forms can share a graph."""


def tensors_in(value: object) -> list[Tensor]:
    """The tensors, in an order that the form determines."""
    return [leaf for _, leaf in _leaves(value, "") if isinstance(leaf, Tensor)]


def form_of(value: object) -> Form:
    return tuple(_described(path, leaf) for path, leaf in _leaves(value, ""))


def replaced(value: Any, put: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    """The same structure with put(tensor) for each tensor. Aliases are preserved.

    known: replacements of earlier calls, by id() of the original, which has to stay alive while `known` is used.
    """
    if isinstance(value, CONSTANTS):
        return value
    # Containers and constants have no identity that matters: only tensors and objects are looked up in `known`.
    if isinstance(value, tuple | list):
        parts = (replaced(part, put, known) for part in value)
        # A named tuple takes its fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: replaced(part, put, known) for name, part in value.items()}
    if id(value) not in known:
        known[id(value)] = put(value) if isinstance(value, Tensor) else _rebuilt(value, put, known)
    return known[id(value)]


def _rebuilt(value: Any, put: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    parts = {name: replaced(part, put, known) for name, part in _parts(value).items()}
    # Without __init__, whose checks or derived fields may need the original tensors.
    new = copy.copy(value)
    # A cache of the original would hold tensors that are not static.
    forgotten = {field.name: _default(field) for field in _remembered(value)}
    for name, part in {**parts, **forgotten}.items():
        object.__setattr__(new, name, part)  # also of a frozen dataclass
    return new


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, (*CONSTANTS, Tensor)):
        yield path, value
        return
    # The type is a part of the form: a list and a tuple of the same tensors are different calls.
    yield path, type(value)
    for name, part in _parts(value).items():
        yield from _leaves(part, f"{path}.{name}")


def _described(path: str, leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        return path, leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return path, type(leaf), leaf


def _parts(value: object) -> Mapping[str, object]:
    """Raises TypeError for an argument type that a graph does not support."""
    if isinstance(value, tuple | list):
        return {str(number): part for number, part in enumerate(value)}
    if isinstance(value, dict):
        return value
    if callable(value) or isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        raise TypeError(type(value).__name__)
    return {name: part for name, part in vars(value).items() if not name.startswith("_")}


def _remembered(value: object) -> list[Field[Any]]:
    if not is_dataclass(value):
        return []
    return [field for field in fields(value) if field.name.startswith("_")]


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
