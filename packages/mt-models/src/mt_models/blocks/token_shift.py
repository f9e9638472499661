"""The position before each position, which RWKV mixes in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.cache import Cache, SequenceState


class TokenShift(nn.Module):
    """x_t -> x_(t-1): [B, S, C] -> the same, zeros before the first position of a document."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.channels, self.dtype = channels, dtype

    def forward(self, x: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> Tensor:
        if cache is not None:
            return cache.advance(self, _advance, (x,))
        shifted = F.pad(x[:, :-1], (0, 0, 1, 0))
        if segment_ids is None:
            return shifted
        begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
        return shifted.masked_fill(begins[..., None], 0.0)

    def cached_state(self) -> SequenceState:
        """The last position."""
        return SequenceState((((self.channels,), self.dtype),))


def _advance(new: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    (x,), (last,) = new, state
    # [B, 1 + S, C] without the last: each position's predecessor.
    return torch.cat((last[:, None], x[:, :-1]), 1), (x[:, -1],)
