"""Generation: neighbours are encoded when their chunk is complete, and kept until the next one is.

Shapes as in retro.attention; T new positions of all sequences in a row, n chunks that they complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.nn.cache import Cache, CachedSequence
from mt_models.blocks.cross_attention import CrossAttention
from mt_models.retro.attention import EVERYTHING, ChunkedCrossAttention, NeighborCrossAttention, TextChunks


@dataclass(frozen=True)
class NewPositions:
    """Those of one sequence: `count` after `start`. m: tokens of a chunk.

    before: chunks that other sequences of the row complete before this one's.
    """

    start: int
    count: int
    m: int
    neighbor_mask: Tensor
    """[L, K r] bool: tokens of the neighbours of each chunk, without padding."""
    before: int = 0

    @property
    def completed(self) -> range:
        """Numbers of the chunks that the new positions complete."""
        return range(self.start // self.m, (self.start + self.count) // self.m)

    def groups(self) -> Iterator[tuple[int, slice]]:
        """(chunk, its attending positions among the new ones); -1: the first m - 1 positions, which see no chunk."""
        place = 0
        while place < self.count:
            # m = 4: positions 0 to 2 see no chunk (-1), 3 to 6 chunk 0, 7 to 10 chunk 1.
            chunk = (self.start + place + 1) // self.m - 1
            # (chunk + 2) m - 1 is the last position of chunk + 1, the first that sees the next one.
            end = min((chunk + 2) * self.m - 1 - self.start, self.count)
            yield chunk, slice(place, end)
            place = end

    def seen(self, chunk: int) -> Tensor | None:
        """[K r] bool of a chunk's neighbours; None for a chunk without any."""
        known = 0 <= chunk < len(self.neighbor_mask) and bool(self.neighbor_mask[chunk].any())
        return self.neighbor_mask[chunk] if known else None

    def attending(self) -> Tensor:
        """[count] bool"""
        flags = torch.zeros(self.count, dtype=torch.bool, device=self.neighbor_mask.device)
        for chunk, places in self.groups():
            flags[places] = self.seen(chunk) is not None
        return flags


def new_positions(cache: Cache, m: int, retrieved: int) -> list[NewPositions]:
    """Neighbours of each sequence of a forward pass. retrieved: K r."""
    every: list[NewPositions] = []
    before = 0
    for sequence in cache.sequences:
        every.append(
            NewPositions(sequence.start, sequence.count, m, _neighbor_mask(sequence, retrieved, cache), before)
        )
        before += len(every[-1].completed)
    return every


def _neighbor_mask(sequence: CachedSequence, retrieved: int, cache: Cache) -> Tensor:
    mask = sequence.conditioning.get("neighbor_mask")
    if mask is None:
        return torch.zeros((0, retrieved), dtype=torch.bool, device=cache.tokens.device)
    return mask.bool().flatten(1)


def completed_text(layer: NeighborCrossAttention, text: Tensor, cache: Cache, count: int) -> TextChunks:
    """Keys and values of the `count` chunks that the new positions of text [1, T, H] complete."""
    m = layer.chunk_length

    def whole_chunks(positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """positions [1, S] of new ones; k, v [1, K, N, D] up to them -> [1, whole chunks x m, 2, N, D]"""
        # m = 4, new positions 6 to 12: chunks 1 and 2 (positions 4 to 11) are
        # complete. Positions 4 and 5 come from the cache.
        start, end = int(positions[0, 0]), int(positions[0, -1]) + 1
        first, last = start // m * m, end // m * m
        # k and v end at position end - 1, and may begin anywhere: they hold at most m - 1 positions before `start`.
        kept = slice(k.shape[1] - (end - first), k.shape[1] - (end - last))
        return torch.stack((k[:, kept], v[:, kept]), dim=2)

    # The cache is used for its packing and its memory; no attention is computed here. Keys and values are stacked,
    # since a result is one tensor, and end to end the results of the sequences are the complete chunks in order.
    attended = cache.attend(layer, whole_chunks, (cache.position_ids,), layer.keys_and_values(text))
    # What the row is filled up with may have whole chunks, too.
    k, v = attended[0, : count * m].unflatten(0, (count, m)).unbind(2)
    return k, v


class CachedNeighbors:
    """What new positions attend to: neighbours of the chunks that they complete, and those kept from the chunk before.

    Implements Neighbors. states: [n K, r, H] of the completed chunks; None if there are none. attending: [1, T, 1].
    """

    def __init__(
        self,
        cache: Cache,
        sequences: Sequence[NewPositions],
        states: Tensor | None,
        attending: Tensor,
        num_neighbors: int,
    ) -> None:
        self.cache, self.sequences, self.states = cache, sequences, states
        self.attending, self.num_neighbors = attending, num_neighbors

    def attend(self, layer: ChunkedCrossAttention, q: Tensor) -> Tensor:
        # Of all sequences at once: states of chunks of several sequences are one batch of the encoder.
        new = None if self.states is None else layer.neighbor_keys_and_values(self.states, self.num_neighbors)

        def advance(inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            queries, numbers = inputs
            rows = [
                # Sequence by sequence: each has other chunks and other padding.
                self._advance(layer, queries[row : row + 1], number, tuple(kept[row : row + 1] for kept in state), new)
                for row, number in enumerate(numbers[:, 0].tolist())
            ]
            outputs, states = zip(*rows, strict=True)
            return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*states, strict=True))

        return self.cache.advance(layer, advance, (q, self._numbers(q)))

    def _numbers(self, q: Tensor) -> Tensor:
        """[1, T]: which sequence a position is of; -1 for what the row is filled up with."""
        counts = torch.tensor([sequence.count for sequence in self.sequences], dtype=torch.int64, device=q.device)
        numbers = torch.arange(len(counts), device=q.device).repeat_interleave(counts)
        return torch.nn.functional.pad(numbers, (0, q.shape[1] - len(numbers)), value=-1)[None]

    def _advance(
        self,
        layer: ChunkedCrossAttention,
        q: Tensor,
        number: int,
        kept: tuple[Tensor, ...],
        new: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One sequence: q [1, S, N, D], kept keys and values [1, K r, N, D] of the chunk before the new positions'."""
        out = torch.zeros_like(q)
        if number < 0:
            return out, kept
        sequence = self.sequences[number]
        # This sequence's rows among the chunks that all sequences complete
        own_new = slice(sequence.before, sequence.before + len(sequence.completed))
        if new is not None:
            # [1 + completed, K r, N, D] each: row 0 is the chunk before the new positions' first, then those completed.
            kept = tuple(torch.cat((before, part[own_new])) for before, part in zip(kept, new, strict=True))
        for chunk, places in sequence.groups():
            seen = sequence.seen(chunk)
            if seen is not None:
                # The row of `kept` that holds this chunk
                place = chunk - (sequence.start // sequence.m - 1)
                k, v = (part[place : place + 1] for part in kept)
                out[:, places] = attend_to(layer, q[:, places], k, v, seen)
        # The state has one chunk: the last that is complete.
        return out, tuple(part[-1:] for part in kept)


def attend_to(layer: CrossAttention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q [1, S, N, D], k and v [1, K r, N, D], seen [K r] bool -> [1, S, N, D]"""
    # Padding is removed rather than masked: there is one sequence, so that no shape has to be shared.
    return layer.core(q, k[:, seen], v[:, seen], EVERYTHING, 0.0)
