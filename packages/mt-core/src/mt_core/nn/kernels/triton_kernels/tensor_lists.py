"""Kernels over lists of tensors: one launch whatever their number, by tables on the device.

How the tensors are cut into blocks depends on their sizes and is computed once. Addresses change where autograd
allocates the gradients anew in each step; then a few kilobytes are copied to the device, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2048
"""Elements of a program."""


@dataclass(frozen=True)
class Blocks:
    """sizes: [tensors] int64. owner, first: [programs], the tensor that a program works on (int32) and its first
    element (int64)."""

    sizes: Tensor
    owner: Tensor
    first: Tensor


@dataclass(frozen=True)
class TensorTable:
    """addresses: [lists, tensors] int64. aligned: every address is a multiple of 16 bytes and every size one of 8, so
    that accesses may be 16 bytes wide."""

    addresses: Tensor
    blocks: Blocks
    aligned: bool

    @property
    def programs(self) -> int:
        return len(self.blocks.owner)

    @property
    def tensors(self) -> int:
        return len(self.blocks.sizes)


class TableCache:
    """The tables of the lists that a program works on, by their addresses and sizes; the oldest go first."""

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._blocks: dict[tuple[int, ...], Blocks] = {}
        self._tables: dict[tuple[tuple[int, ...], ...], TensorTable] = {}

    def __call__(self, lists: Sequence[Sequence[Tensor]]) -> TensorTable:
        """lists: of tensors of equal length; the first decides sizes. All contiguous, on one device."""
        # Addresses and sizes are all that a table holds, so a tensor that takes over freed memory of one size is served
        # by the same table.
        sizes = tuple(tensor.numel() for tensor in lists[0])
        key = (*(tuple(t.data_ptr() for t in tensors) for tensors in lists), sizes)
        if key not in self._tables:
            if len(self._tables) == self._capacity:
                # Insertion order: the oldest table.
                del self._tables[next(iter(self._tables))]
            self._tables[key] = _build(lists, self._blocks_of(sizes, lists[0][0].device))
        return self._tables[key]

    def _blocks_of(self, sizes: tuple[int, ...], device: torch.device) -> Blocks:
        if sizes not in self._blocks:
            self._blocks[sizes] = _cut(torch.tensor(sizes), device)
        return self._blocks[sizes]


def _cut(sizes: Tensor, device: torch.device) -> Blocks:
    """See Blocks. sizes: on the host."""
    counts = (sizes + BLOCK - 1) // BLOCK
    # sizes 5000, 100 and blocks of 2048: owner = 0 0 0 1, first = 0 2048 4096 0. A tensor without elements gets no
    # program.
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)  # [programs], blocks of the tensors before
    first = (torch.arange(len(owner)) - before) * BLOCK
    return Blocks(sizes.to(device), owner.to(torch.int32).to(device), first.to(device))


def _build(lists: Sequence[Sequence[Tensor]], blocks: Blocks) -> TensorTable:
    """See TensorTable. Raises ValueError for a tensor that is not contiguous."""
    for tensors in lists:
        if any(not tensor.is_contiguous() for tensor in tensors):
            raise ValueError("kernels over lists of tensors need contiguous ones")
    device = lists[0][0].device
    # Pinned: a copy from other memory would make the host wait for the device.
    addresses = torch.tensor(
        [[tensor.data_ptr() for tensor in tensors] for tensors in lists], pin_memory=device.type == "cuda"
    )  # [lists, tensors]
    # Lists of single numbers, such as step counts, are not read by the block.
    sizes = [tensor.numel() for tensor in lists[0]]
    by_block = [tensors for tensors in lists if [t.numel() for t in tensors] == sizes]
    # 8 elements of 2 bytes are one access of 16 bytes; of 4 bytes they are two.
    aligned = all(t.data_ptr() % 16 == 0 and t.numel() % 8 == 0 for tensors in by_block for t in tensors)
    return TensorTable(addresses.to(device, non_blocking=True), blocks, aligned)
