"""The order of queries, keys and values in the rows of one matrix, which changed with the checkpoint's version.

N heads of D channels on a rank; rows are 3ND.

| version | rows |
| --- | --- |
| 0 | [3, N, D]: all queries, then all keys, then all values |
| 1 | [N, D, 3]: for each channel its query, key and value |
| 2, 3 | [N, 3, D]: for each head its queries, keys and values, as today |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_ckpt.megatron.pieces import Piece

LATEST = 3.0
GROUPED_SINCE = 2.0


def to_grouped(tensor: Tensor, heads: int, version: float) -> Tensor:
    """[3ND, ...] of a version -> today's order. heads: of the rank."""
    rest = tensor.shape[1:]
    # Before version 2 there was no grouped attention: queries, keys and values have equal numbers of heads.
    size = tensor.shape[0] // (3 * heads)
    if version >= GROUPED_SINCE:
        return tensor
    if version >= 1.0:
        # [heads, size, 3] -> [heads, 3, size]
        return tensor.view(heads, size, 3, *rest).transpose(1, 2).reshape(tensor.shape)
    # [3, heads, size] -> [heads, 3, size]
    return tensor.view(3, heads, size, *rest).transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True)
class Regrouped:
    """A rank's queries, keys and values of an older version, read in today's order."""

    piece: Piece
    heads: int
    version: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.piece.dtype

    def read(self) -> Tensor:
        return to_grouped(self.piece.read(), self.heads, self.version)
