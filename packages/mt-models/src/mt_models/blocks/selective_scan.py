"""The state-space recurrence of Mamba-1 (Gu and Dao, 2023), whose decay differs by channel and by state.

For each channel, with a state s [N]:

    s_t = exp(dt_t a) s_(t-1) + dt_t x_t b_t          y_t = s_t . c_t

Shapes: B batch, S positions, C channels, N state size, L positions of a chunk. Everything is computed in fp32. Within a
chunk the recurrence is a prefix scan of log2(L) steps over pairs (decay, added), which are combined by
(a1, s1) then (a2, s2) = (a1 a2, a2 s1 + s2); products of decays are at most 1, so that nothing overflows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32
"""Positions that are scanned together: the tensors of a scan are [B, CHUNK, C, N]."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """x and dt [B, S, C] (dt positive), a [C, N] (negative), b and c [B, S, N] -> y [B, S, C] in fp32, and the state
    [B, C, N] after the last position.

    state: that before the first position; default zeros. segment_ids [B, S]: numbers of the documents that the
    sequence is packed from; each starts from a state of zeros.
    """
    x, dt, b, c = x.float(), dt.float(), b.float(), c.float()
    current = x.new_zeros((x.shape[0], *a.shape)) if state is None else state
    starts = None if segment_ids is None else document_starts(segment_ids)
    outputs = []
    for begin in range(0, x.shape[1], chunk_size):
        part = slice(begin, begin + chunk_size)
        # [B, L, C, N]
        decay = (dt[:, part, :, None] * a).exp()
        if starts is not None:
            decay = decay.masked_fill(starts[:, part, None, None], 0.0)
        added = (dt[:, part] * x[:, part])[..., None] * b[:, part, None]
        kept, states = prefix_scan(decay, added)
        states = states + kept * current[:, None]
        outputs.append(torch.einsum("blcn,bln->blc", states, c[:, part]))
        current = states[:, -1]
    return torch.cat(outputs, 1), current


def document_starts(segment_ids: Tensor) -> Tensor:
    """[B, S] bool: positions whose document is not that of the position before."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))


def prefix_scan(decay: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """[B, L, C, N] each -> products of decays up to each position, and states that begin with zeros."""
    distance, length = 1, decay.shape[1]
    while distance < length:
        # A position joins what ends `distance` before it; those at the beginning are complete.
        joined = added[:, distance:] + decay[:, distance:] * added[:, :-distance]
        added = torch.cat([added[:, :distance], joined], 1)
        decay = torch.cat([decay[:, :distance], decay[:, distance:] * decay[:, :-distance]], 1)
        distance *= 2
    return decay, added
