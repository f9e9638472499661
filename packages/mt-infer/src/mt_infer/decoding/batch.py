"""The cache as the layers see it in a decode step of static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mt_core.nn.cache import CachedSequence, KeepsState, PagedScores
from mt_infer.cache.formats import PlainStore
from mt_infer.cache.manager import CacheManager
from mt_infer.decoding.choice import choose_paged_attention
from mt_infer.decoding.inputs import DecodeInputs
from mt_infer.decoding.paged_attention import PagedAttention, PageTable


# Against CachedBatch: all rows have one position and attend through tables of fixed size, in one launch for the batch.
# Lengths are values in device memory, not shapes, so that a graph serves all of them.
class DecodeBatch:
    """Implements mt_core.nn.cache.Cache for one new position of each row of `inputs`.

    Nothing here depends on values: what it launches can be captured, and the inputs changed in place afterwards. Layers
    with states of positions have to be paged, and none may attend to an encoder's memory.
    """

    sequences: Sequence[CachedSequence] = ()
    is_batch_invariant = False

    def __init__(self, inputs: DecodeInputs, manager: CacheManager) -> None:
        self.inputs, self.manager = inputs, manager
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
        assert paged is not None, "refused by mt_infer.decoding.objections"
        group = self._groups[id(layer)]
        stored = []
        for store, values in zip(self.manager.storages[group].of(layer), kept, strict=True):
            assert isinstance(store, PlainStore), "refused by mt_infer.decoding.objections"
            # [rows, ...] at [rows] places; rows of filler all write to the spare place, in any order.
            store.write(self.inputs.places(group), values[0])
            stored.append(store.values)
        table = PageTable(
            self.inputs.blocks[group], self.inputs.position_ids[0], self.manager.storages[group].block_size
        )
        return paged(TabledPages(table, choose_paged_attention(new[0].device, new[0].dtype)), *new, *stored)

    def attend_memory(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        make: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> Tensor:
        raise AssertionError("refused by mt_infer.decoding.objections")

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
