"""Cross attention in chunks: of the text to its neighbours, and of neighbours to the chunk that they were found for.

Shapes: B batch, S sequence, m tokens of a chunk, L chunks of a sequence, K neighbours of a chunk, r tokens of a
neighbour, H hidden, N heads of this rank, D head size. With sequence parallelism S and r are sharded between the
layers; the linear layers all-gather whole sequences, which are then split into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_models.blocks.cross_attention import CrossAttention
from mt_models.retro.chunks import attending_chunks, chunks, from_attending_chunks

EVERYTHING = AttentionPattern(causal=False)


@dataclass(frozen=True)
class Neighbors:
    """Encoded neighbours of all chunks of a batch.

    states: [B L K, r, H]. pattern: of attention to the K r tokens of a chunk's neighbours. attending: [B, S, 1] bool
    (S as the residual stream has it), False where there is nothing to attend to. chunk_length: m.
    """

    states: Tensor
    pattern: AttentionPattern
    attending: Tensor
    chunk_length: int
    num_neighbors: int


class ChunkedCrossAttention(CrossAttention):
    """The text's attention to neighbours: each attending chunk sees those of one chunk (CCA of the paper)."""

    def forward(self, x: Tensor, neighbors: Neighbors) -> Tensor:  # type: ignore[override]
        """[B, S, H] -> the same; 0 where there is nothing to attend to."""
        q = self.linear_q(x).unflatten(-1, (-1, self.head_dim))  # [B, S, N, D]
        sequences, length = q.shape[:2]
        k, v = (
            part.unflatten(0, (-1, neighbors.num_neighbors)).flatten(1, 2)  # [B L, K r, N, D]
            for part in self.keys_and_values(neighbors.states)
        )
        queries = attending_chunks(q, neighbors.chunk_length)
        out = self.core(queries, k, v, neighbors.pattern, self.dropout.begin())
        out = self.linear_proj(from_attending_chunks(out, sequences, length).flatten(2))
        # Positions that attend to nothing get no bias either.
        return torch.where(neighbors.attending, out, 0.0)


class NeighborCrossAttention(CrossAttention):
    """The attention of a chunk's neighbours to the chunk, as the decoder sees it."""

    def forward(self, x: Tensor, text: Tensor, chunk_length: int, num_neighbors: int) -> Tensor:  # type: ignore[override]
        """[B L K, r, H], text [B, S, H] -> [B L K, r, H]"""
        q = self.linear_q(x).unflatten(-1, (-1, self.head_dim))  # [B L K, r, N, D]
        k, v = (chunks(part, chunk_length) for part in self.keys_and_values(text))  # [B L, m, N, D]
        # The neighbours' tokens are queries only: they do not attend to one another.
        queries = q.unflatten(0, (-1, num_neighbors)).flatten(1, 2)
        out = self.core(queries, k, v, EVERYTHING, self.dropout.begin())
        return self.linear_proj(out.unflatten(1, (num_neighbors, -1)).flatten(0, 1).flatten(2))
