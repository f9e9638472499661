"""A cache of results of operations on the meta device. torch computes their shapes in Python, which takes most of the
time of a plan, and the same operations recur in every layer and layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

IMMUTABLE = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
"""Arguments whose equality implies the same meaning."""


@dataclass(frozen=True)
class Form:
    """A tensor with new storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class ResultCache:
    """Calls operations, each with the same arguments once; tensors are equal arguments if their forms are.

    Only operations that return new tensors, and neither mutate nor alias others, are cached.
    """

    def __init__(self) -> None:
        self._results: dict[object, Form | tuple[type, list[Form | None]]] = {}
        self._makes_new: dict[Any, bool] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        key = self.key(func, args, options)
        return func(*args, **options) if key is None else self.of(key, func, args, options)

    def of(self, key: object, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """The result of an operation that has a cache key."""
        # A new tensor of the same form: two calls must not share storage, which is counted.
        if (known := self._results.get(key)) is not None:
            return _made(known)
        out = func(*args, **options)
        if (form := _form_of_result(out, (*args, *options.values()))) is not None:
            self._results[key] = form
        return out

    def key(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> object | None:
        """The cache key; None: the result is not cached, or an argument has values."""
        if func not in self._makes_new:
            self._makes_new[func] = _makes_new_tensors(func)
        if not self._makes_new[func]:
            return None
        described: list[Any] = [func, *options]  # names of keyword arguments, then all values
        if not (_describe(args, described) and _describe(options.values(), described)):
            return None
        return tuple(described)


def _makes_new_tensors(func: Any) -> bool:
    schema = func._schema
    aliases = any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and not aliases


def _describe(values: Iterable[Any], described: list[Any]) -> bool:
    """Appends what the form of a result depends on. False: an argument that this does not describe."""
    for value in values:
        if isinstance(value, Tensor):
            # Complex tensors may have the conjugate bit set.
            if not value.is_meta or value.is_complex():
                return False
            described += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, (list, tuple)):
            described += (type(value), len(value))
            if not _describe(value, described):
                return False
        elif isinstance(value, IMMUTABLE):
            described += (type(value), value)  # 2 and 2.0 give different dtypes
        else:
            return False
    return True


def _form_of_result(out: Any, arguments: tuple[Any, ...]) -> Form | tuple[type, list[Form | None]] | None:
    """None if the result is not a new tensor, or not a collection of new tensors."""
    # A result that is an argument or a view of one is no new tensor, whatever the schema says.
    taken = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(arguments)}
    if isinstance(out, Tensor):
        return _form_of_new(out, taken)
    if not isinstance(out, (list, tuple)):
        return None
    forms: list[Form | None] = []
    for item in out:
        form = _form_of_new(item, taken) if isinstance(item, Tensor) else None
        if form is None and item is not None:
            return None
        forms.append(form)
    return type(out), forms


def _form_of_new(tensor: Tensor, taken: set[StorageWeakRef]) -> Form | None:
    """taken: storages of other results; this one's is added."""
    storage = StorageWeakRef(tensor.untyped_storage())
    if not tensor.is_meta or tensor.is_complex() or storage in taken:
        return None
    taken.add(storage)
    form = Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    # A result that is a part of a larger storage would be counted with less memory.
    whole = form.empty().untyped_storage().nbytes()
    return form if tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == whole else None


def _made(form: Form | tuple[type, list[Form | None]]) -> Any:
    if isinstance(form, Form):
        return form.empty()
    kind, parts = form
    return kind([None if part is None else part.empty() for part in parts])


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
