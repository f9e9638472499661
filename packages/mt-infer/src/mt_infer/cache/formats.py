"""How a value of a position is stored in the cache: as the layer gives it, or in 8 bits.

With 8 bits each vector (the last dimension: a head's key, a latent) has a scale. What layers read is dequantized, also
of positions that were computed in the same pass: tokens do not depend on how a prompt is cut.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from mt_infer.quantization.groups import FORMATS, dequantize, quantize

Shape = tuple[int, ...]


class PositionStore(Protocol):
    """One tensor of all places of a group: [places, ...]."""

    def write(self, places: Tensor, values: Tensor) -> Tensor:
        """values [T, ...] at places [T]; returns what reading them gives."""
        ...

    def read(self, places: slice | Tensor) -> Tensor: ...

    def copy(self, source: slice, to: slice) -> None: ...


class PlainStore:
    """In the layer's dtype."""

    def __init__(self, places: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros: a masked place is multiplied by 0, and must be finite.
        self.values = torch.zeros((places, *shape), dtype=dtype, device=device)

    def write(self, places: Tensor, values: Tensor) -> Tensor:
        # values [T, ...] -> [places, ...]. In place, so that captured graphs keep the address.
        self.values.index_copy_(0, places, values)
        return values

    def read(self, places: slice | Tensor) -> Tensor:
        return taken(self.values, places)

    def copy(self, source: slice, to: slice) -> None:
        self.values[to] = self.values[source]


class QuantizedStore:
    """In 8 bits, one scale a vector."""

    def __init__(self, name: str, places: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        # One group of quantization for each vector, whose length is the last dimension.
        self.name, self.columns, self.dtype = name, shape[-1], dtype
        # The parts of one quantized vector, with their shapes and dtypes, repeated for all places: stored zeros, scale
        # 1.
        blank = quantize(torch.zeros((1, *shape), device=device), name, self.columns)
        self.parts = [part.expand(places, *part.shape[1:]).clone() for part in blank]

    def write(self, places: Tensor, values: Tensor) -> Tensor:
        stored = quantize(values, self.name, self.columns)
        for part, new in zip(self.parts, stored, strict=True):
            part.index_copy_(0, places, new)
        # Not `values`: a position must have the same keys for the chunk that computed it and for all later ones.
        return self._dequantized(stored)

    def read(self, places: slice | Tensor) -> Tensor:
        return self._dequantized(tuple(taken(part, places) for part in self.parts))

    def copy(self, source: slice, to: slice) -> None:
        for part in self.parts:
            part[to] = part[source]

    def _dequantized(self, stored: tuple[Tensor, ...]) -> Tensor:
        return dequantize(stored, self.name, self.columns, self.columns).to(self.dtype)


def taken(tensor: Tensor, places: slice | Tensor) -> Tensor:
    """A slice is read without a copy."""
    # [K, ...]
    return tensor[places] if isinstance(places, slice) else tensor.index_select(0, places)


def new_store(name: str, places: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> PositionStore:
    """name: of inference.cache_dtype."""
    if name == "auto":
        return PlainStore(places, shape, dtype, device)
    return QuantizedStore(name, places, shape, dtype, device)


def bytes_of(name: str, shape: Shape, dtype: torch.dtype) -> int:
    """Of one position."""
    if name == "auto":
        return math.prod(shape) * dtype.itemsize
    # The stored numbers, and an fp32 scale for each vector.
    return math.prod(shape) * FORMATS[name].bits // 8 + math.prod(shape[:-1]) * torch.float32.itemsize
