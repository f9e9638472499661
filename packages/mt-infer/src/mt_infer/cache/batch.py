"""The cache as the layers see it, for the sequences of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mt_core.nn.attention_backends.batch_invariant import KEYS
from mt_core.nn.cache import Conditioning, KeepsState
from mt_infer.cache.manager import CacheManager

if TYPE_CHECKING:
    from mt_infer.requests import RunningSequence


@dataclass(frozen=True)
class Chunk:
    """The new positions of one sequence in a forward pass: `count` of them after `start`. It is a CachedSequence.

    logits: of how many of the last ones logits are requested. drafts: guessed tokens, at the last positions.
    """

    sequence: RunningSequence
    start: int
    count: int
    logits: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Number of positions that are in the cache afterwards, without drafted ones."""
        return self.start + self.count - len(self.drafts)

    @property
    def first_logits(self) -> int:
        """The first position of which logits are requested."""
        return self.start + self.count - self.logits

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled behind it."""
        # All known tokens are computed, and drafts, if any, follow them.
        return self.end == len(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.end], *self.drafts]

    @property
    def past(self) -> Tensor:
        return torch.tensor(self.sequence.tokens[: self.start])

    @property
    def new(self) -> Tensor:
        return torch.tensor(self.tokens)

    @property
    def conditioning(self) -> Conditioning:
        return self.sequence.conditioning or {}


class CachedBatch:
    """Implements mt_core.nn.cache.Cache for chunks of sequences, packed one after another into a row.

    multiple: the row is filled up to a multiple of so many positions, which sequence parallelism divides.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        manager: CacheManager,
        device: torch.device,
        *,
        is_batch_invariant: bool = False,
        multiple: int = 1,
    ) -> None:
        self.sequences, self.manager, self.is_batch_invariant = chunks, manager, is_batch_invariant
        self.device, self.multiple = device, multiple
        # Example, chunks of A (positions 10 and 11) and B (0 ... 2), multiple=4:
        #   tokens        A10 A11 B0 B1 B2 0 0 0     [1, T] with T = 8
        #   position_ids   10  11  0  1  2 0 0 0
        #   ends           2, 5; count 5, filler 3; logit_rows [1, 4]
        self.ends = list(accumulate(chunk.count for chunk in chunks))
        self.count = self.ends[-1] if chunks else 0
        # At least one position: ranks that share experts compute together.
        self.filler = -self.count % multiple if chunks else multiple
        self.tokens = self._row([token for chunk in chunks for token in chunk.tokens])
        self.position_ids = self._row(
            [position for chunk in chunks for position in range(chunk.start, chunk.start + chunk.count)]
        )
        # [R] rows of the row of positions, in the order of chunks.
        self.logit_rows = torch.tensor(
            [row for chunk, end in zip(chunks, self.ends, strict=True) for row in range(end - chunk.logits, end)],
            dtype=torch.int64,
            device=device,
        )
        # By identity of the layer: modules are not compared by value. Layers outlive the batch.
        self._groups = {
            id(layer): number for number, group in enumerate(manager.layout.groups) for layer in group.layers
        }
        self._places: dict[int, _Places] = {}
        self.hidden: Tensor | None = None
        """[1, T, H]: the input of the LM head, after a forward pass of the last stage."""

    @property
    def capacities(self) -> Tensor:
        return self._row([chunk.sequence.capacity for chunk in self.sequences for _ in range(chunk.count)], filler=1)

    def attend(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        kept: tuple[Tensor, ...],
        paged: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        number = self._groups[id(layer)]
        # One store for each tensor of the layer, such as its keys and its values.
        stored, places = self.manager.storages[number].of(layer), self._of_group(number)
        # Written first: a sequence that is read from the cache below gets its new positions too.
        pairs = zip(stored, kept, strict=True)
        written = [store.write(places.written, values[0, : self.count])[None] for store, values in pairs]
        outputs = []
        for chunk, end, read in zip(self.sequences, self.ends, places.read, strict=True):
            span = slice(end - chunk.count, end)  # columns of the row
            # A new sequence attends to itself only: what was stored is what it has.
            # [1, K, ...], K the positions so far (of a window: those that are read), the new ones last.
            past = [x[:, span] for x in written] if chunk.start == 0 else [store.read(read)[None] for store in stored]
            # One call a sequence: attention kernels take one length of keys, and sequences differ in it.
            outputs.append(attend(*(x[:, span] for x in new), *past))
        # Filler attends to itself, so that the result has the shape [1, T, ...]. Nothing of it is stored.
        if self.filler:
            outputs.append(attend(*(x[:, self.count :] for x in (*new, *kept))))
        return _packed(outputs)

    def attend_memory(
        self,
        layer: KeepsState,
        attend: Callable[..., Tensor],
        new: tuple[Tensor, ...],
        make: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> Tensor:
        outputs = []
        for chunk, end in zip(self.sequences, self.ends, strict=True):
            # The layer's keys and values of the encoder's output, made in the sequence's first pass and released with
            # its cache.
            memory = chunk.sequence.memory
            if id(layer) not in memory:
                length = int(chunk.conditioning["memory_length"])
                memory[id(layer)] = tuple(x[:, :length] for x in make(chunk.conditioning["memory"]))
            outputs.append(attend(*(x[:, end - chunk.count : end] for x in new), *memory[id(layer)]))
        if self.filler:
            outputs.append(torch.zeros_like(new[0][:, self.count :]))
        return _packed(outputs)

    def advance(
        self,
        layer: KeepsState,
        advance: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]],
        inputs: tuple[Tensor, ...],
    ) -> Tensor:
        assert self.manager.states is not None
        states = self.manager.states.of(layer)
        # Replaced below: results come by length, and are packed in the order of sequences.
        outputs: list[Tensor] = [torch.empty(0)] * len(self.sequences)
        for numbers in self._by_length():
            chunks = [self.sequences[number] for number in numbers]
            spans = [range(self.ends[number] - self.sequences[number].count, self.ends[number]) for number in numbers]
            rows = torch.tensor([[*span] for span in spans], device=self.device)  # [B, S]
            slots = torch.tensor([chunk.sequence.slot for chunk in chunks], device=self.device)  # [B]
            # Indexing by tensors copies: the states given are not those that are written below.
            out, after = advance(tuple(x[0, rows] for x in inputs), tuple(state[slots] for state in states))
            for state, value in zip(states, after, strict=True):
                # Layers may compute states in another dtype than they keep.
                state[slots] = value.to(state.dtype)
            for number, result in zip(numbers, out.split(1), strict=True):
                outputs[number] = result
        if self.filler:
            # Filler starts from zeros and stores no state.
            zeros = tuple(torch.zeros_like(state[:1]) for state in states)
            outputs.append(advance(tuple(x[:, self.count :] for x in inputs), zeros)[0])
        return _packed(outputs)

    def positions_for_logits(self, x: Tensor) -> Tensor:
        self.hidden = x
        # With sequence parallelism x has a part of the positions; those requested are taken of the logits.
        return x if self.multiple > 1 else x[:, self.logit_rows]

    def _by_length(self) -> list[list[int]]:
        """Numbers of the sequences that advance together: those with one new position, and each other by itself."""
        # Decode steps of all sequences are one batch. Chunks of prompts differ in length, and a recurrence cannot be
        # padded without changing its state.
        singles = [number for number, chunk in enumerate(self.sequences) if chunk.count == 1]
        others = [[number] for number, chunk in enumerate(self.sequences) if chunk.count > 1]
        return [*others, singles] if singles else others

    def _row(self, values: list[int], filler: int = 0) -> Tensor:
        return torch.tensor([values + [filler] * self.filler], device=self.device)

    def _of_group(self, number: int) -> _Places:
        # Once a pass for all layers of the group, which share tables.
        if number not in self._places:
            window = self.manager.layout.groups[number].window
            tables = [chunk.sequence.tables[number] for chunk in self.sequences]
            written = [
                _numbers(table.places(chunk.start, chunk.start + chunk.count))
                for table, chunk in zip(tables, self.sequences, strict=True)
            ]
            read = [
                _on_device(table.places(self._first_read(chunk, window), chunk.start + chunk.count), self.device)
                for table, chunk in zip(tables, self.sequences, strict=True)
            ]
            # The empty array: a pass without sequences has nothing to concatenate.
            every = np.concatenate([np.empty(0, np.int64), *written])
            self._places[number] = _Places(torch.from_numpy(every).to(self.device), read)
        return self._places[number]

    def _first_read(self, chunk: Chunk, window: int | None) -> int:
        # The first new position, chunk.start, sees keys from chunk.start + 1 - window on; later ones see less of the
        # past.
        first = 0 if window is None else max(chunk.start + 1 - window, 0)
        # The batch-invariant core adds keys up in blocks of KEYS from position 0. Starting between two of them would
        # add in another order; `CacheLimits.unread` keeps the blocks before the window for it.
        return first // KEYS * KEYS if self.is_batch_invariant else first


@dataclass(frozen=True)
class _Places:
    """written: [T] places in the storage for the new positions. read: of each sequence, a range of places or a list."""

    written: Tensor
    read: list[slice | Tensor]


def _packed(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _numbers(places: slice | np.ndarray) -> np.ndarray:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places


def _on_device(places: slice | np.ndarray, device: torch.device) -> slice | Tensor:
    """A slice is read without a copy."""
    return places if isinstance(places, slice) else torch.from_numpy(places).to(device)
