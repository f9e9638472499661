"""The tensors of the cache: positions in the dtype of the layer or in 8 bits, and recurrent states.

With 8 bits each vector (the last dimension: a head's key, a latent) has a scale. What layers read is dequantized, also
of positions that were computed in the same pass: tokens do not depend on how a prompt is cut.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.cache import KeepsState, SequenceState
from mt_infer.cache.layout import CacheGroup, CacheLayout
from mt_infer.quantization.groups import dequantize, quantize

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


class GroupStorage:
    """What the layers of a group keep: for each tensor of a layer a store of blocks * block_size places, and one more
    place that no sequence has."""

    def __init__(self, group: CacheGroup, blocks: int, block_size: int, device: torch.device) -> None:
        self.group, self.blocks, self.block_size = group, blocks, block_size
        # By layer: one flat tensor [places, ...] for each of its tensors. Place = block * block_size + offset, the same
        # in all layers of the group.
        self._stores = {
            id(layer): tuple(
                new_store(group.format, self.spare_place + 1, shape, state.dtype, device) for shape in state.shapes
            )
            for layer, state in zip(group.layers, group.states, strict=True)
        }

    @property
    def spare_place(self) -> int:
        """What no sequence has is written here: the rows that fill a batch of a fixed size."""
        return self.blocks * self.block_size

    def of(self, layer: KeepsState) -> tuple[PositionStore, ...]:
        return self._stores[id(layer)]

    def copy_block(self, block: int, to: int) -> None:
        size = self.block_size
        # A block number stands for the same positions in every layer of the group.
        for stores in self._stores.values():
            for store in stores:
                store.copy(slice(block * size, (block + 1) * size), slice(to * size, (to + 1) * size))


class StateStorage:
    """The recurrent states of all sequences: for each tensor of a layer [slots, ...]. No sequence has the last slot."""

    def __init__(self, layout: CacheLayout, slots: int, device: torch.device) -> None:
        self._tensors = {id(layer): _state_tensors(state, slots, device) for layer, state in layout.recurrent}
        # Rows of filler in a captured step read and write it.
        self.spare_slot = slots - 1
        # A stack: slot 0 is taken first.
        self._free = list(reversed(range(self.spare_slot)))

    def take(self) -> int:
        """A slot, its states set to zero."""
        slot = self._free.pop()
        for tensors in self._tensors.values():
            for tensor in tensors:
                tensor[slot].zero_()
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def free(self) -> int:
        return len(self._free)

    def of(self, layer: KeepsState) -> tuple[Tensor, ...]:
        return self._tensors[id(layer)]

    def snapshot(self, slot: int) -> list[Tensor]:
        return [tensor[slot].clone() for tensors in self._tensors.values() for tensor in tensors]

    def restore(self, slot: int, snapshot: list[Tensor]) -> None:
        every = [tensor for tensors in self._tensors.values() for tensor in tensors]
        for tensor, kept in zip(every, snapshot, strict=True):
            tensor[slot].copy_(kept)


def _state_tensors(state: SequenceState, slots: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.zeros((slots, *shape), dtype=dtype, device=device) for shape, dtype in state.tensors)
