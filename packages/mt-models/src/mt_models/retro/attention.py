"""Cross attention in chunks: of the text to its neighbours, and of neighbours to the chunk that they were found for.

Shapes: B batch, S sequence, m tokens of a chunk, L chunks of a sequence, K neighbours of a chunk, r tokens of a
neighbour, H hidden, N heads of this rank, D head size. With sequence parallelism S and r are sharded between the
layers; the linear layers all-gather whole sequences, which are then split into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import PositionState, SequenceState
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import AttentionConfigLike
from mt_models.blocks.cross_attention import CrossAttention

# -- chunks, shifted so that each sees the neighbours of the previous one ----------------------------
#
# Shapes: B batch, S sequence, m tokens of a chunk, L = S // m whole chunks, ... anything.
#
# The neighbours of chunk u are known once all its tokens are. The first position that may see them is therefore the
# last of chunk u, which predicts the first token of chunk u + 1; the last is the one before the last of chunk u + 1.
# Attending chunk u is these m positions: chunk u moved to the right by m - 1.


def chunks(x: Tensor, m: int) -> Tensor:
    """[B, S, ...] -> [B L, m, ...]; tokens after the last whole chunk are dropped."""
    whole = x.shape[1] // m
    return x[:, : whole * m].unflatten(1, (whole, m)).flatten(0, 1)


def attending_chunks(x: Tensor, m: int) -> Tensor:
    """[B, S, ...] -> [B L, m, ...]; zeros stand where the last of them reaches beyond the sequence."""
    # m = 4, S = 8: chunk 0, tokens 0 to 3, attends as positions 3 to 6; chunk 1 as position 7 and three zeros.
    whole = x.shape[1] // m
    return chunks(_pad(x[:, m - 1 :], before=0, length=whole * m), m)


def from_attending_chunks(x: Tensor, sequences: int, length: int) -> Tensor:
    """[B L, m, ...] -> [B, S, ...], the inverse; zeros at the first m - 1 positions, which attend to nothing."""
    rows = x.unflatten(0, (sequences, -1)).flatten(1, 2)
    first = x.shape[1] - 1
    return _pad(rows[:, : length - first], before=first, length=length)


def _pad(x: Tensor, *, before: int, length: int) -> Tensor:
    """[B, n, ...] -> [B, length, ...] with zeros before and behind."""
    behind = length - before - x.shape[1]
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, behind))


EVERYTHING = AttentionPattern(causal=False)


class Neighbors(Protocol):
    """Encoded neighbours of the chunks of a batch.

    attending: [B, S, 1] bool (S as the residual stream has it), False where there is nothing to attend to.
    """

    @property
    def attending(self) -> Tensor: ...

    def attend(self, layer: ChunkedCrossAttention, q: Tensor) -> Tensor:
        """The layer's queries [B, S, N, D] -> [B, S, N, D], anything where there is nothing to attend to."""
        ...


@dataclass(frozen=True)
class BatchNeighbors:
    """Neighbours of whole sequences, as in training. Implements Neighbors.

    states: [B L K, r, H]. pattern: of attention to the K r tokens of a chunk's neighbours. chunk_length: m.
    """

    states: Tensor
    pattern: AttentionPattern
    attending: Tensor
    chunk_length: int
    num_neighbors: int

    def attend(self, layer: ChunkedCrossAttention, q: Tensor) -> Tensor:
        sequences, length = q.shape[:2]
        k, v = layer.neighbor_keys_and_values(self.states, self.num_neighbors)
        # [B, S, N, D] -> [B L, m, N, D]: each chunk's m attending positions are a batch row of their own,
        # beside the keys and values [B L, K r, N, D] of its neighbours.
        queries = attending_chunks(q, self.chunk_length)
        out = layer.core(queries, k, v, self.pattern, layer.dropout.begin())
        return from_attending_chunks(out, sequences, length)


class ChunkedCrossAttention(CrossAttention):
    """The text's attention to neighbours: each attending chunk sees those of one chunk (CCA of the paper).

    retrieved: K r, tokens of a chunk's neighbours.
    """

    def __init__(self, config: AttentionConfigLike, core: AttentionCore, ctx: ParallelContext, retrieved: int) -> None:
        super().__init__(config, core, ctx)
        self.retrieved = retrieved

    def forward(self, x: Tensor, neighbors: Neighbors) -> Tensor:  # type: ignore[override]
        """[B, S, H] -> the same; 0 where there is nothing to attend to."""
        q = self.linear_q(x).unflatten(-1, (-1, self.head_dim))  # [B, S, N, D]
        out = self.linear_proj(neighbors.attend(self, q).flatten(2))
        # Positions that attend to nothing get no bias either.
        return torch.where(neighbors.attending, out, 0.0)

    def neighbor_keys_and_values(self, states: Tensor, num_neighbors: int) -> tuple[Tensor, Tensor]:
        """[n K, r, H] -> of n chunks [n, K r, N, D] each"""
        # [n K, r, N, D] -> [n, K, r, N, D] -> [n, K r, N, D]: the softmax is
        # over the tokens of all K neighbours together.
        k, v = (part.unflatten(0, (-1, num_neighbors)).flatten(1, 2) for part in self.keys_and_values(states))
        return k, v

    def cached_state(self) -> SequenceState:  # type: ignore[override]
        """Keys and values of the neighbours that were encoded last."""
        shape = (self.retrieved, self.linear_q.weight.shape[0] // self.head_dim, self.head_dim)
        # The neighbours of one chunk: those of the chunks before are never attended to again.
        return SequenceState(((shape, self.linear_kv.weight.dtype),) * 2)


TextChunks = tuple[Tensor, Tensor]
"""Keys and values that neighbours attend to, of whole chunks of the text: [n, m, N, D] each."""


class NeighborCrossAttention(CrossAttention):
    """The attention of a chunk's neighbours to the chunk, as the decoder sees it. chunk_length: m."""

    def __init__(
        self, config: AttentionConfigLike, core: AttentionCore, ctx: ParallelContext, chunk_length: int
    ) -> None:
        super().__init__(config, core, ctx)
        self.chunk_length = chunk_length

    def chunks_of(self, text: Tensor) -> TextChunks:
        """[B, S, H] -> of B L chunks"""
        k, v = (chunks(part, self.chunk_length) for part in self.keys_and_values(text))
        return k, v

    def cached_state(self) -> PositionState:  # type: ignore[override]
        """Keys and values of the text, until their chunk is complete."""
        shape = (self.linear_q.weight.shape[0] // self.head_dim, self.head_dim)
        return PositionState((shape, shape), self.linear_kv.weight.dtype, self.chunk_length)

    def forward(self, x: Tensor, text: Tensor | TextChunks, num_neighbors: int) -> Tensor:  # type: ignore[override]
        """[n K, r, H], text [B, S, H] or its n chunks -> [n K, r, H]"""
        q = self.linear_q(x).unflatten(-1, (-1, self.head_dim))  # [n K, r, N, D]
        k, v = text if isinstance(text, tuple) else self.chunks_of(text)
        # The neighbours' tokens are queries only: they do not attend to one another.
        # [n K, r, N, D] -> [n, K r, N, D], beside the keys of the chunk [n, m, N, D]
        queries = q.unflatten(0, (-1, num_neighbors)).flatten(1, 2)
        out = self.core(queries, k, v, EVERYTHING, self.dropout.begin())
        return self.linear_proj(out.unflatten(1, (num_neighbors, -1)).flatten(0, 1).flatten(2))
