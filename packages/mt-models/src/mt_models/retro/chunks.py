"""Splits sequences into chunks, and shifts them so that a chunk sees the neighbours of the previous one.

Shapes: B batch, S sequence, m tokens of a chunk, L = S // m whole chunks, ... anything.

The neighbours of chunk u are known once all its tokens are. The first position that may see them is therefore the
last of chunk u, which predicts the first token of chunk u + 1; the last is the one before the last of chunk u + 1.
Attending chunk u is these m positions: chunk u moved to the right by m - 1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
