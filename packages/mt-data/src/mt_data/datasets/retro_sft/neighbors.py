"""Passages as the neighbours of chunks: ids, cut or padded to the length that the encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.text_files import Encode


@dataclass(frozen=True)
class NeighborShape:
    """chunk_length: m. num_neighbors: K, of a chunk. retrieved_length: r, tokens of a neighbour."""

    chunk_length: int
    num_neighbors: int
    retrieved_length: int

    def tokens(self, passages: Sequence[str], encode: Encode) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids [K, r] of the first K passages, and 1 for ids, 0 for padding [K, r]."""
        ids = np.zeros((self.num_neighbors, self.retrieved_length), np.int64)
        mask = np.zeros_like(ids)
        for row, passage in enumerate(passages[: self.num_neighbors]):
            found = encode(passage)[: self.retrieved_length]
            ids[row, : len(found)] = found
            mask[row, : len(found)] = 1
        return ids, mask

    def of_every_chunk(self, neighbors: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
        """[K, r] -> [L, K, r], the same for each whole chunk of so many positions."""
        chunks = positions // self.chunk_length
        return np.broadcast_to(neighbors, (chunks, *neighbors.shape)).copy()
