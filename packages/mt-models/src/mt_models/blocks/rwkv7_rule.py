"""The recurrence of RWKV-7 (Peng et al., RWKV-7 "Goose", 2025): a delta rule with a decay of each channel, in which the
keys that are removed differ from those that are written.

For each head, with a state S [D, V] that maps keys to values, a decay w_t [D] in the exponent, a unit key z_t that is
looked up, and the rates a_t [D] at which what is found there is removed:

    S <- diag(exp(w_t)) S - (z_t * a_t) (z_t^T S) + k_t v_t^T          o_t = r_t^T S

All three terms of the sum read the S before the position. `chunked_rwkv7_rule` computes whole chunks: with G_i the sum
of w up to position i, [x_i, y_j] = sum_d x_i y_j exp(G_(i-1) - G_j), and c_i = z_i^T S_(i-1), what position i finds,
the c of a chunk solve

    c_i = (z_i exp(G_(i-1)))^T S + sum_(j < i) [z_i, k_j] v_j - [z_i, z_j a_j] c_j

a triangular system. Decays are bounded below (`LOWEST_DECAY`), so that exp(G_i) and exp(-G_j) of a chunk are finite and
the sums over channels are matrix products.

Shapes: B batch, S positions, H heads, D channels of a key, V channels of a value, K chunks, L positions of a chunk.
Everything is computed in fp32, or in fp64 where r is fp64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_models.blocks.chunk_segments import ChunkSegments, chunk_segments

LOWEST_DECAY = -math.exp(-0.5)
"""The decay's exponent is this times a sigmoid."""
MAX_CHUNK = 64
"""exp(-LOWEST_DECAY * MAX_CHUNK / 2), the largest factor, is 3e8."""


class Rwkv7Inputs(NamedTuple):
    """What the rule reads of each position."""

    r: Tensor
    """[B, S, H, D]: what is read from the state."""
    w: Tensor
    """[B, S, H, D]: logarithm of the decay, from LOWEST_DECAY to 0."""
    k: Tensor
    """[B, S, H, D]"""
    v: Tensor
    """[B, S, H, V]"""
    z: Tensor
    """[B, S, H, D]: the unit key that is looked up."""
    a: Tensor
    """[B, S, H, D]: rates of removal, from 0 to 1."""


def recurrent_rwkv7_rule(
    inputs: Rwkv7Inputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> o [B, S, H, V] in the dtype of v, and the state [B, H, D, V] after the last position.

    state: that before the first position; default zeros. segment_ids [B, S]: numbers of the documents that the
    sequence is packed from; each starts from a state of zeros.
    """
    r, w, k, v, z, a = _in_one_dtype(inputs)
    decay, removed = w.exp(), z * a
    if segment_ids is not None:
        # The first position continues a state that is given.
        kept = F.pad(segment_ids[:, 1:] == segment_ids[:, :-1], (1, 0), value=True)[..., None, None]
        decay, removed = decay * kept, removed * kept
    state = _start(r, v) if state is None else state.to(r.dtype)
    outputs = []
    for t in range(r.shape[1]):
        looked_up = z[:, t, :, None] @ state  # [B, H, 1, V]
        state = (
            state * decay[:, t, ..., None]
            - removed[:, t, ..., None] * looked_up
            + k[:, t, ..., None] * v[:, t, :, None]
        )
        outputs.append((r[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def chunked_rwkv7_rule(
    inputs: Rwkv7Inputs, *, chunk_size: int, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_rwkv7_rule`. chunk_size: at most MAX_CHUNK."""
    length = inputs.v.shape[1]
    size = min(chunk_size, length)
    # [B, H, K, L, D or V]. Positions that are added at the end decay nothing and write nothing.
    r, w, k, v, z, a = (_chunks(x, size) for x in _in_one_dtype(inputs))
    segments = None if segment_ids is None else chunk_segments(segment_ids, size)
    total = w.cumsum(-2)
    before = total - w  # G_(i-1)
    # Exponents relative to the middle of the chunk, so that both factors are at most exp(L / 2 * 0.61).
    middle = total[..., size // 2, :][..., None, :]
    removed = z * a
    written, taken = (x * (middle - total).exp() for x in (k, removed))  # as later positions see them
    looks, reads = z * (before - middle).exp(), r * (total - middle).exp()
    # Position i looks up before it writes, and reads after it.
    earlier, seen = _masks(size, segments, r)
    system = (looks @ taken.transpose(-1, -2)) * earlier  # + I: `unitriangular`
    reach, to_end = before.exp(), (total[..., -1:, :] - total).exp()
    reach_read, over_chunk = total.exp(), total[..., -1, :].exp()
    if segments is not None:
        from_before = segments.from_before[:, None, ..., None]
        reach, reach_read = reach * from_before, reach_read * from_before
        to_end = to_end * segments.to_end[:, None, ..., None]
        over_chunk = over_chunk * segments.over_chunk[:, None, ..., None]
    right = torch.cat((((looks @ written.transpose(-1, -2)) * earlier) @ v, z * reach), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    looked_up, of_state = solved.split((v.shape[-1], z.shape[-1]), -1)  # c = looked_up + of_state S
    start = _start(inputs.r, v, r.dtype) if state is None else state.to(r.dtype)
    states, looked_up, last = _through_chunks(looked_up, of_state, (k * to_end, removed * to_end, v), over_chunk, start)
    o = ((reads @ written.transpose(-1, -2)) * seen) @ v - ((reads @ taken.transpose(-1, -2)) * seen) @ looked_up
    o = o + (r * reach_read) @ states
    return o.movedim(1, 3).flatten(1, 2)[:, :length].to(inputs.v.dtype), last


def _masks(size: int, segments: ChunkSegments | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """1 where position i sees position j of its chunk: for j < i, and for j <= i; [L, L] or [B, 1, K, L, L]."""
    whole = torch.ones(size, size, dtype=like.dtype, device=like.device)
    earlier, seen = whole.tril(-1), whole.tril()
    if segments is None:
        return earlier, seen
    together = (~segments.apart)[:, None]
    return earlier * together, seen * together


def _through_chunks(
    looked_up: Tensor, of_state: Tensor, ends: tuple[Tensor, Tensor, Tensor], over_chunk: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """States before all chunks [B, H, K, D, V], what each position finds [B, H, K, L, V], the state behind the last.

    ends: keys that are written and removed, decayed to the end of their chunk, and values. over_chunk [B, H, K, D].
    """
    before, complete = [], []
    for from_chunk, of, written, removed, v, kept in zip(
        *(x.unbind(2) for x in (looked_up, of_state, *ends, over_chunk)), strict=True
    ):
        before.append(state)
        complete.append(from_chunk + of @ state)
        state = state * kept[..., None] + written.transpose(-1, -2) @ v - removed.transpose(-1, -2) @ complete[-1]
    return torch.stack(before, dim=2), torch.stack(complete, dim=2), state


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, S, H, D] -> [B, H, K, L, D], with zeros at the end."""
    if missing := -x.shape[1] % size:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.unflatten(1, (-1, size)).movedim(3, 1)


def _in_one_dtype(inputs: Rwkv7Inputs) -> tuple[Tensor, ...]:
    dtype = torch.float64 if inputs.r.dtype == torch.float64 else torch.float32
    return tuple(x.to(dtype) for x in inputs)


def _start(r: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return r.new_zeros(r.shape[0], r.shape[2], r.shape[3], v.shape[-1], dtype=dtype or r.dtype)
