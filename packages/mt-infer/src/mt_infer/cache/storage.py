"""The tensors of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.cache import KeepsState, SequenceState
from mt_infer.cache.formats import PositionStore, new_store
from mt_infer.cache.layout import CacheGroup, CacheLayout


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
