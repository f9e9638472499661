"""Which positions of a chunked recurrence belong to one document of a packed sequence.

Shapes: B batch, S positions, K chunks, L positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkSegments:
    """Boolean masks for positions of one segment, within a chunk and across chunks."""

    apart: Tensor
    """[B, K, L, L]: two positions are of different segments."""
    from_before: Tensor
    """[B, K, L]: the position is of the segment in which the chunk before ends."""
    to_end: Tensor
    """[B, K, L]: the position is of the segment in which its chunk ends."""
    over_chunk: Tensor
    """[B, K]: the chunk ends in the segment in which the one before ends."""


def chunk_segments(segment_ids: Tensor, size: int) -> ChunkSegments:
    """segment_ids [B, S], cut into chunks of `size` positions."""
    # The added positions belong to the last document, so that the state reaches the end of its chunk.
    missing = -segment_ids.shape[1] % size
    filled = torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, missing)], dim=1)
    ids = filled.unflatten(1, (-1, size))
    end = ids[:, :, -1]
    # The first chunk has no chunk before it. Its own first id lets a given start state reach the first document.
    before = torch.cat([ids[:, 0, :1], end[:, :-1]], dim=1)
    return ChunkSegments(
        apart=ids[..., :, None] != ids[..., None, :],
        from_before=ids == before[..., None],
        to_end=ids == end[..., None],
        over_chunk=end == before,
    )
