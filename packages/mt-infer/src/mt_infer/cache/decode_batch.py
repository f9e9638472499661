"""The cache as the layers see it in a decode step of static shapes, and the static input tensors of such a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mt_core.nn.cache import CachedSequence, KeepsState, PagedScores
from mt_core.nn.kernels.request import KernelRequest, supports_triton
from mt_infer.blocks import BlockTable
from mt_infer.cache.manager import CacheManager
from mt_infer.cache.paged_attention import PagedAttention, PageTable, plain_paged_attention
from mt_infer.cache.storage import PlainStore

if TYPE_CHECKING:
    from mt_infer.requests import RunningSequence


TOKEN, POSITION, CAPACITY, SLOT, PLACES = range(5)
"""Rows of `DecodeInputs.numbers`; the places of further groups follow."""


@dataclass
class _Written:
    """The table that a row of `blocks` was filled from, and its `changes` then."""

    table: BlockTable | None = None
    changes: int = -1


class DecodeInputs:
    """For `rows` sequences, of which the first have work; the others compute a token that no sequence has.

    numbers: [4 + groups, rows] int64, copied to the device for each step. blocks: of each group [rows, M] int32, copied
    when a sequence has a block more, or the rows have other sequences.
    """

    def __init__(self, rows: int, manager: CacheManager, device: torch.device) -> None:
        self.rows, self.manager = rows, manager
        # M, for the longest sequence: a table in a graph cannot grow.
        blocks = -(-manager.limits.max_model_len // manager.limits.block_size)
        groups = len(manager.storages)
        # All numbers are one tensor, so that a step makes one copy to the device for them.
        self._host_numbers = _on_host((PLACES + groups, rows), torch.int64, device)
        self._host_blocks = [_on_host((rows, blocks), torch.int32, device) for _ in range(groups)]
        self.numbers = self._host_numbers.to(device, copy=True)
        self.blocks = [host.to(device, copy=True) for host in self._host_blocks]
        # The same memory, for the host to write.
        # A write of one element costs less through NumPy than through torch.
        self._number_values = self._host_numbers.numpy()
        self._block_values = [host.numpy() for host in self._host_blocks]
        self._written = [[_Written() for _ in range(rows)] for _ in range(groups)]
        self.read_places: list[list[slice | Tensor]] = [[] for _ in range(groups)]
        """For each group and each row, the places of the positions that the row sees; on a CPU alone."""
        self._is_on_host = device.type == "cpu"

    @property
    def tokens(self) -> Tensor:
        """[1, rows]"""
        return self.numbers[TOKEN : TOKEN + 1]

    @property
    def position_ids(self) -> Tensor:
        """[1, rows]"""
        return self.numbers[POSITION : POSITION + 1]

    @property
    def capacities(self) -> Tensor:
        """[1, rows]"""
        return self.numbers[CAPACITY : CAPACITY + 1]

    @property
    def slots(self) -> Tensor:
        """[rows]: of recurrent states"""
        return self.numbers[SLOT]

    def places(self, group: int) -> Tensor:
        """[rows]: where the new positions are stored"""
        return self.numbers[PLACES + group]

    def fill(self, sequences: Sequence[RunningSequence]) -> None:
        """The next position of each sequence. The copies to the device are in the order of its stream; the host may
        write the next step once it has read the tokens of this one."""
        # Pinned host memory may be rewritten only after the copy has read it. Reading the step's tokens waits for the
        # stream, and the copy is before them on it.
        self._fill_numbers(sequences)
        if self._is_on_host:
            self._fill_read_places(sequences)
        self.numbers.copy_(self._host_numbers, non_blocking=True)
        for group, (host, blocks) in enumerate(zip(self._host_blocks, self.blocks, strict=True)):
            if self._fill_blocks(group, sequences):
                blocks.copy_(host, non_blocking=True)

    def _fill_numbers(self, sequences: Sequence[RunningSequence]) -> None:
        numbers, states = self._number_values, self.manager.states
        # What rows of filler have: token 0 at position 0, the spare slot, the spare place of each group.
        numbers[:PLACES] = 0
        numbers[CAPACITY] = 1
        numbers[SLOT] = 0 if states is None else states.spare_slot
        # [groups, 1] over [groups, rows]; 0 for a model without positions in the cache, such as a pure recurrent one.
        numbers[PLACES:] = [[storage.spare_place] for storage in self.manager.storages] or 0
        for row, sequence in enumerate(sequences):
            position = sequence.computed
            # In the order of TOKEN, POSITION, CAPACITY, SLOT.
            numbers[:PLACES, row] = sequence.tokens[position], position, sequence.capacity, sequence.slot or 0
            for group, table in enumerate(sequence.tables):
                numbers[PLACES + group, row] = table.place(position)

    def _fill_read_places(self, sequences: Sequence[RunningSequence]) -> None:
        groups = zip(self.read_places, self.manager.storages, self.manager.layout.groups, strict=True)
        for number, (places, storage, group) in enumerate(groups):
            spare = slice(storage.spare_place, storage.spare_place + 1)
            places[:] = [spare] * self.rows
            for row, sequence in enumerate(sequences):
                end = sequence.computed + 1
                first = 0 if group.window is None else max(end - group.window, 0)
                row_places = sequence.tables[number].places(first, end)
                places[row] = row_places if isinstance(row_places, slice) else torch.from_numpy(row_places)

    def _fill_blocks(self, group: int, sequences: Sequence[RunningSequence]) -> bool:
        """Whether there was anything new."""
        values, is_new = self._block_values[group], False
        # strict=False: rows of filler keep the table of an earlier step. They read one key, at position 0 of a block
        # that exists.
        for row, (sequence, written) in enumerate(zip(sequences, self._written[group], strict=False)):
            table = sequence.tables[group]
            # Most steps add no block, so that nothing is copied: a sequence gets one every block_size steps.
            if written.table is table and written.changes == table.changes:
                continue
            # A block that has left the window is not read; any number will do.
            values[row, : len(table.blocks)] = np.array([block or 0 for block in table.blocks], dtype=np.int32)
            written.table, written.changes, is_new = table, table.changes, True
        return is_new


def _on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory; pinned where `device` is a GPU, so that copies to it are asynchronous."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


# Against CachedBatch: all rows have one position and attend through tables of fixed size, in one launch for the batch.
# Lengths are values in device memory, not shapes, so that a graph serves all of them.
class DecodeBatch:
    """Implements mt_core.nn.cache.Cache for one new position of each row of `inputs`.

    Nothing here depends on values: what it launches can be captured, and the inputs changed in place afterwards. Layers
    with states of positions have to be paged, and none may attend to an encoder's memory.
    """

    sequences: Sequence[CachedSequence] = ()
    is_batch_invariant = False

    def __init__(self, inputs: DecodeInputs, manager: CacheManager, attention: PagedAttention | None = None) -> None:
        self.inputs, self.manager, self.attention = inputs, manager, attention
        self._groups = {
            id(layer): number for number, group in enumerate(manager.layout.groups) for layer in group.layers
        }

    @property
    def tokens(self) -> Tensor:
        return self.inputs.tokens

    @property
    def position_ids(self) -> Tensor:
        return self.inputs.position_ids

    @property
    def capacities(self) -> Tensor:
        return self.inputs.capacities

    def attend(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        kept: tuple[Tensor, ...],
        paged: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        assert paged is not None, "refused by mt_infer.decode_graphs"
        group = self._groups[id(layer)]
        stored = []
        for store, values in zip(self.manager.storages[group].of(layer), kept, strict=True):
            assert isinstance(store, PlainStore), "refused by mt_infer.decode_graphs"
            # [rows, ...] at [rows] places; rows of filler all write to the spare place, in any order.
            store.write(self.inputs.places(group), values[0])
            stored.append(store.values)
        size, inputs = self.manager.storages[group].block_size, self.inputs
        table = PageTable(inputs.blocks[group], inputs.position_ids[0], size, inputs.read_places[group])
        attention = self.attention or choose_paged_attention(new[0].device, new[0].dtype)
        return paged(TabledPages(table, attention), *new, *stored)

    def attend_memory(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        make: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> Tensor:
        raise AssertionError("refused by mt_infer.decode_graphs")

    def advance(
        self,
        layer: KeepsState,
        advance: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]],
        inputs: tuple[Tensor, ...],
    ) -> Tensor:
        assert self.manager.states is not None
        states, slots = self.manager.states.of(layer), self.inputs.slots
        before = tuple(state.index_select(0, slots) for state in states)  # [rows, ...]
        # x [1, rows, ...] -> [rows, 1, ...]: a batch of sequences of one position.
        out, after = advance(tuple(x.transpose(0, 1) for x in inputs), before)
        for state, value in zip(states, after, strict=True):
            # Rows of filler share the spare slot; which of them is written last does not matter.
            state.index_copy_(0, slots, value.to(state.dtype))
        return out.transpose(0, 1)

    def positions_for_logits(self, x: Tensor) -> Tensor:
        # Every row samples.
        return x


class TabledPages:
    """Implements mt_core.nn.cache.Pages."""

    def __init__(self, table: PageTable, attention: PagedAttention) -> None:
        self.table, self.attention = table, attention

    def attend(
        self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], values: Tensor, scores: PagedScores
    ) -> Tensor:
        return self.attention(tuple(query[0] for query in queries), keys, values, self.table, scores)[None]

    @property
    def room(self) -> int:
        return self.table.blocks.shape[1] * self.table.block_size

    @property
    def last(self) -> Tensor:
        return self.table.positions

    def places(self, positions: Tensor) -> Tensor:
        size, blocks = self.table.block_size, self.table.blocks.long()
        return blocks.gather(1, positions // size) * size + positions % size


def choose_paged_attention(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The Triton kernel on a GPU that it can run on, else plain torch."""
    request = KernelRequest(device_type=device.type, dtype=str(dtype).removeprefix("torch."))
    if device.type != "cuda" or supports_triton(request) is not True:
        return plain_paged_attention
    # Not at the top of the module: Triton is not installed everywhere.
    from mt_infer.cache.triton_attention import triton_paged_attention

    return triton_paged_attention
