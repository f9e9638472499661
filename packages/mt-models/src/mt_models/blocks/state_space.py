"""The state-space recurrence of Mamba-2 (Dao and Gu, Transformers are SSMs, 2024), in its two forms.

For each head, with a state s [P, N]:

    s_t = exp(dt_t a) s_(t-1) + dt_t x_t b_t^T          y_t = s_t c_t

`chunked_scan` computes a whole sequence by the paper's structured state-space duality: within a chunk as attention
with decaying scores, between chunks by the states at their ends. `recurrent_step` computes one position.

Shapes: B batch, S positions, H heads, P head size, G groups (G divides H; a group's b and c serve R = H / G heads),
N state size, K chunks, L positions of a chunk. States are [B, H, P, N]. Everything is computed in fp32, but for the
logarithms of decays, which reach hundreds within a chunk and of which differences are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_models.blocks.chunk_segments import ChunkSegments, chunk_segments


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk_size: int,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [B, S, H, P], dt [B, S, H] (positive), a [H] (negative), b and c [B, S, G, N] -> y [B, S, H, P] in the
    dtype of x, and the state after the last position.

    state: that before the first position; default zeros. segment_ids [B, S]: numbers of the documents that the
    sequence is packed from; each starts from a state of zeros.
    """
    # A sequence shorter than a chunk is one chunk of its own length: padding it would cost size^2 scores for nothing.
    #
    # Steps, for S = 6, L = 2, K = 3:
    #   within   y of positions 2k, 2k + 1 from inputs of the same chunk, a masked product of [L, L] scores
    #   states   of 3 chunks, one after another: the only loop, with K steps instead of S
    #   carried  y of chunk k from the state before it, decayed to each position
    length, groups = x.shape[1], b.shape[2]
    size = min(chunk_size, length)
    dt = dt.float()
    # dt is both the step of the input and the exponent of the decay, so x is multiplied by it once, here.
    inputs = _chunks(x.float() * dt[..., None], size).unflatten(3, (groups, -1))  # [B, K, L, G, R, P]
    decay = _Decay.since_start(_chunks(dt * a.float(), size).unflatten(3, (groups, -1)))
    b, c = _chunks(b.float(), size), _chunks(c.float(), size)  # [B, K, L, G, N]
    segments = None if segment_ids is None else chunk_segments(segment_ids, size)
    # [B, H, P, N] -> [B, G, R, P, N]; heads of one group are adjacent.
    start = None if state is None else state.unflatten(1, (groups, -1))

    within = _within_chunks(inputs, decay, b, c, segments)
    before, last = _states_before_chunks(inputs, decay, b, start, segments)
    # Decay from the start of the chunk to after each position [B, K, L, G, R]. Without low: the rounding of high is
    # relative, and where high is large enough for it to matter, exp(high) is nearly 0.
    reach = decay.high.exp()
    if segments is not None:
        # A document that begins within the chunk gets nothing of the state before it.
        reach = reach * segments.from_before[..., None, None]
    carried = torch.einsum("bklgn,bkgrpn->bklgrp", c, before) * reach[..., None]
    # [B, K, L, G, R, P] -> [B, K L, G R, P]; positions that `_chunks` added are cut off.
    y = (within + carried).flatten(1, 2).flatten(2, 3)
    return y[:, :length].to(x.dtype), last.flatten(1, 2)


def recurrent_step(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One position: state [B, H, P, N], x [B, H, P], dt [B, H], a [H], b and c [B, G, N] -> y [B, H, P] in the dtype
    of x, and the new state."""
    groups = b.shape[1]
    # [B, H] -> [B, H, 1, 1]: one rate for all P x N entries of a head, which is what Mamba-2 restricts of Mamba-1.
    kept = state * (dt.float() * a.float()).exp()[..., None, None]
    # [B, H, P] -> [B, G, R, P]
    inputs = (x.float() * dt.float()[..., None]).unflatten(1, (groups, -1))
    added = inputs[..., None] * b.float()[:, :, None, None]  # [B, G, R, P, N]
    state = kept + added.flatten(1, 2)
    y = torch.einsum("bgrpn,bgn->bgrp", state.unflatten(1, (groups, -1)), c.float())
    return y.flatten(1, 2).to(x.dtype), state


def recurrent_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result of chunked_scan, one position after another: a position's result does not depend on where the scan
    began."""
    if state is None:
        state = x.new_zeros((x.shape[0], *x.shape[2:], b.shape[3]), dtype=torch.float32)
    outputs = []
    for place in range(x.shape[1]):
        if segment_ids is not None and place:
            # [B]: rows of the batch have their document boundaries at different
            # places, so the reset is a mask and no branch.
            goes_on = segment_ids[:, place] == segment_ids[:, place - 1]
            state = state.masked_fill(~goes_on[:, None, None, None], 0.0)
        y, state = recurrent_step(state, x[:, place], dt[:, place], a, b[:, place], c[:, place])
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, S, ...] -> [B, K, L, ...], the last chunk filled with zeros: with dt = 0 they leave the state alone."""
    missing = -x.shape[1] % size
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)).unflatten(1, (-1, size))


@dataclass(frozen=True)
class _Decay:
    """Logarithms of decays in a chunk from its start to after each position: high + low, [B, K, L, G, R].

    high is rounded to fp32, low is what that leaves out, 2^-24 of it at most. Without low the difference of two
    positions side by side would have the error of their sums: 6e-6 where these are 100.
    """

    high: Tensor
    low: Tensor

    @classmethod
    def since_start(cls, steps: Tensor) -> _Decay:
        """steps [B, K, L, G, R]: of each position."""
        # fp64 for the sum alone, of one number for each position and head; high + low keep 48 bits of it.
        exact = steps.double().cumsum(2)
        high = exact.float()
        # d(high)/d(steps) is that of the whole sum. low is a rounding, constant for autograd.
        return cls(high, (exact.detach() - high.detach()).float())

    def between(self) -> Tensor:
        """[B, K, G, R, L, L]: from after position s (last) to after l."""
        # [B, K, L, G, R] -> [B, K, G, R, L]. Neighbours differ by little, so the difference of their high
        # parts is exact, and that of the low parts adds what both lost.
        high, low = (part.permute(0, 1, 3, 4, 2) for part in (self.high, self.low))
        return (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])

    def to_end(self) -> Tensor:
        """[B, K, L, G, R]: from after each position to the end of the chunk."""
        return (self.high[:, :, -1:] - self.high) + (self.low[:, :, -1:] - self.low)


def _within_chunks(inputs: Tensor, decay: _Decay, b: Tensor, c: Tensor, segments: ChunkSegments | None) -> Tensor:
    """Contributions from positions of the same chunk: [B, K, L, G, R, P]."""
    # The scores [B, K, G, L, L] are those of a group; the decays below give each of its R heads other weights.
    scores = torch.einsum("bklgn,bksgn->bkgls", c, b)
    size = inputs.shape[2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=inputs.device).triu(1)
    if segments is not None:
        hidden = hidden | segments.apart[:, :, None, None]
    # Masked before the exponential, which would overflow for positions ahead.
    decays = decay.between().masked_fill(hidden, float("-inf")).exp()
    return torch.einsum("bkgrls,bksgrp->bklgrp", scores[:, :, :, None] * decays, inputs)


def _states_before_chunks(
    inputs: Tensor, decay: _Decay, b: Tensor, start: Tensor | None, segments: ChunkSegments | None
) -> tuple[Tensor, Tensor]:
    """States at the start of every chunk [B, K, G, R, P, N], and after the last one [B, G, R, P, N]."""
    to_end = decay.to_end().exp()
    over_chunk = decay.high[:, :, -1].exp()
    if segments is not None:
        to_end = to_end * segments.to_end[..., None, None]
        over_chunk = over_chunk * segments.over_chunk[..., None, None]
    added = torch.einsum("bklgrp,bklgn->bkgrpn", inputs * to_end[..., None], b)
    # added [B, K, G, R, P, N]: what the positions of each chunk leave in the state at its end.
    current = torch.zeros_like(added[:, 0]) if start is None else start
    before = []
    for chunk in range(added.shape[1]):
        before.append(current)
        current = current * over_chunk[:, chunk, ..., None, None] + added[:, chunk]
    return torch.stack(before, dim=1), current
