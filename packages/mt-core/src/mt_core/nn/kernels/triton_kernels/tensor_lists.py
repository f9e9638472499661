"""Kernels over lists of tensors: one launch whatever their number, by tables of addresses on the device.

A table is made when addresses change, which for weights, moments and main gradients is at the first step only, so
that a steady step copies nothing to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2048
"""Elements of a program."""


@dataclass(frozen=True)
class TensorTable:
    """addresses: [lists, tensors] int64. sizes: [tensors] int64. owner, first: [programs], the tensor that a program
    works on (int32) and its first element (int64). aligned: every address is a multiple of 16 bytes and every size
    one of 8, so that accesses may be 16 bytes wide."""

    addresses: Tensor
    sizes: Tensor
    owner: Tensor
    first: Tensor
    aligned: bool

    @property
    def programs(self) -> int:
        return len(self.owner)

    @property
    def tensors(self) -> int:
        return len(self.sizes)


class TableCache:
    """The tables of the lists that a program works on, by their addresses and sizes; the oldest go first."""

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._tables: dict[tuple[tuple[int, ...], ...], TensorTable] = {}

    def __call__(self, lists: Sequence[Sequence[Tensor]]) -> TensorTable:
        """lists: of tensors of equal length; the first decides sizes. All contiguous, on one device."""
        # Addresses and sizes are all that a table holds, so a tensor that takes over freed memory of one size is served
        # by the same table.
        key = (*(tuple(t.data_ptr() for t in tensors) for tensors in lists), tuple(t.numel() for t in lists[0]))
        if key not in self._tables:
            if len(self._tables) == self._capacity:
                # Insertion order: the oldest table.
                del self._tables[next(iter(self._tables))]
            self._tables[key] = _build(lists)
        return self._tables[key]


def _build(lists: Sequence[Sequence[Tensor]]) -> TensorTable:
    """See TensorTable. Raises ValueError for a tensor that is not contiguous."""
    for tensors in lists:
        if any(not tensor.is_contiguous() for tensor in tensors):
            raise ValueError("kernels over lists of tensors need contiguous ones")
    device = lists[0][0].device
    sizes = torch.tensor([tensor.numel() for tensor in lists[0]])
    blocks = (sizes + BLOCK - 1) // BLOCK
    # sizes 5000, 100 and blocks of 2048: owner = 0 0 0 1, first = 0 2048 4096 0. A tensor without elements gets no
    # program.
    owner = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    before = torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)  # [programs], blocks of the tensors before
    addresses = torch.tensor([[tensor.data_ptr() for tensor in tensors] for tensors in lists])  # [lists, tensors]
    first = (torch.arange(len(owner)) - before) * BLOCK
    # Lists of single numbers, such as step counts, are not read by the block.
    by_block = [tensors for tensors in lists if [t.numel() for t in tensors] == sizes.tolist()]
    # 8 elements of 2 bytes are one access of 16 bytes; of 4 bytes they are two.
    aligned = all(t.data_ptr() % 16 == 0 and t.numel() % 8 == 0 for tensors in by_block for t in tensors)
    return TensorTable(
        addresses.to(device), sizes.to(device), owner.to(torch.int32).to(device), first.to(device), aligned
    )
