"""Typed values of a GGUF file's metadata.

A file says itself of which type a value is, so that any key may hold anything; some models have a list for each layer
where others have one number.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mt_ckpt.gguf.split_files import GGUFTensors
from mt_core.errors import CheckpointError

T = TypeVar("T", int, float, str, bool)
NAMES: Mapping[type, str] = {int: "integer", float: "number", str: "text", bool: "boolean"}


def value_of(values: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """None: the file does not have the key. Raises CheckpointError for a value of another type."""
    value = values.get(key)
    if value is not None and not _is_of(value, kind):
        raise CheckpointError(f"{key} is {reprlib.repr(value)}; read is one {NAMES[kind]}")
    return value


def list_of(values: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """[]: the file does not have the key. Raises CheckpointError for a value of another type."""
    entries = values.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(_is_of(entry, kind) for entry in entries):
        raise CheckpointError(f"{key} is {reprlib.repr(entries)}; read is a list, each entry one {NAMES[kind]}")
    return entries


def _is_of(value: Any, kind: type) -> bool:
    # Not isinstance: bool is a subclass of int.
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


class ArchitectureMetadata:
    """The metadata behind `<architecture>.`, and the file's tensors (mt_models.gguf.Metadata).

    Numbers are those that somebody wrote: the file holds 1e-05 in 32 bits, which is 9.999999747378752e-06.
    """

    def __init__(self, architecture: str, file: GGUFTensors) -> None:
        self.architecture, self._file = architecture, file

    def get(self, key: str, kind: type[T]) -> T | None:
        value = value_of(self._file.metadata, f"{self.architecture}.{key}", kind)
        return kind(shortest(value)) if kind is float and value is not None else value

    def need(self, key: str, kind: type[T]) -> T:
        """Raises CheckpointError where the file has no such key, and for a size below 1."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"the file has no {self.architecture}.{key}")
        return value

    def size(self, key: str) -> int:
        value = self.need(key, int)
        if value < 1:
            raise CheckpointError(f"{self.architecture}.{key} is {value}; it has to be 1 or more")
        return value

    def numbers(self, key: str) -> list[int]:
        """One for each layer."""
        if isinstance(self._file.metadata.get(f"{self.architecture}.{key}"), list):
            return list_of(self._file.metadata, f"{self.architecture}.{key}", int)
        return [self.need(key, int)] * self.need("block_count", int)

    def flags(self, key: str) -> list[bool]:
        """One for each layer. Raises CheckpointError where the file has another number of them."""
        flags, layers = list_of(self._file.metadata, f"{self.architecture}.{key}", bool), self.need("block_count", int)
        if len(flags) != layers:
            raise CheckpointError(f"{self.architecture}.{key} has {len(flags)} entries for {layers} layers")
        return flags

    def decimals(self, key: str) -> list[float]:
        """One for each layer; none where the file does not have the key."""
        return [float(shortest(value)) for value in list_of(self._file.metadata, f"{self.architecture}.{key}", float)]

    def has_tensor(self, name: str) -> bool:
        return name in self._file.tensors

    def tensor(self, name: str) -> Tensor:
        return self._file.read(name)

    def shape(self, name: str) -> Sequence[int]:
        info = self._file.tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing in the checkpoint")
        return info.shape


def shortest(value: float) -> float:
    """The shortest number that is the same in 32 bits."""
    return next(x for digits in range(1, 18) if _single(x := float(f"{value:.{digits}g}")) == _single(value))


def _single(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
