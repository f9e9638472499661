"""The gated delta rule (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024), in its two forms.

For each value head, with a state S [D, V] that maps keys to values:

    S <- exp(g_t) S          u_t = beta_t (v_t - S^T k_t)          S <- S + k_t u_t^T          o_t = S^T q_t

`chunked_delta_rule` computes a whole sequence: within a chunk by a triangular system, between chunks by the states at
their ends. `recurrent_delta_rule` computes one position after the other.

Shapes: B batch, S positions, G key heads, H value heads (G divides H; a key head serves R = H / G adjacent value
heads), D channels of a query and key, V channels of a value, K chunks, L positions of a chunk. Everything is computed
in fp32, or in fp64 where the queries are fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_models.blocks.chunk_segments import ChunkSegments, chunk_segments

L2_EPSILON = 1e-6
"""Added to the sum of squares of a query or key."""


class DeltaInputs(NamedTuple):
    """What the rule reads of each position."""

    q: Tensor
    """[B, S, G, D], of any length: it is normalized here."""
    k: Tensor
    """[B, S, G, D], of any length: it is normalized here."""
    v: Tensor
    """[B, S, H, V]"""
    g: Tensor
    """[B, S, H] in fp32: logarithm of the decay, not above 0; [B, S, H, D] in Kimi delta attention."""
    beta: Tensor
    """[B, S, H]: strength of the update."""


def unit_queries_and_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both divided by their lengths, queries by sqrt(D) too, in fp32 at least."""
    q, k = (x if x.dtype == torch.float64 else x.float() for x in (q, k))
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPSILON) * q.shape[-1] ** -0.5)
    return q, k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPSILON)


# -- one position after the other --------------------------------------------------------------------


def recurrent_delta_rule(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> o [B, S, H, V] in the dtype of v, and the state [B, H, D, V] after the last position.

    state: that before the first position; default zeros. segment_ids [B, S]: numbers of the documents that the sequence
    is packed from; each starts from a state of zeros.
    """
    q, k = unit_queries_and_keys(inputs.q, inputs.k)
    repeats = inputs.v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (q, k))
    v, beta = inputs.v.to(q.dtype), inputs.beta.to(q.dtype)
    decay = inputs.g.to(q.dtype).exp()
    if segment_ids is not None:
        # Where a document begins nothing is kept of the state. The first position continues a state that is given.
        kept = F.pad(segment_ids[:, 1:] == segment_ids[:, :-1], (1, 0), value=True)
        decay = decay * kept[..., None]
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        o, state = _step(state, q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t])
        outputs.append(o)
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One position: state [B, H, D, V], q and k [B, H, D], v [B, H, V], decay and beta [B, H] -> o [B, H, V], state."""
    state = state * decay[..., None, None]
    read = (k[..., None, :] @ state).squeeze(-2)  # [B, H, 1, D] [B, H, D, V] -> [B, H, V]
    state = state + k[..., None] * ((v - read) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


# -- whole chunks --------------------------------------------------------------------------------------
#
# With G_i the sum of g over the positions of a chunk up to i, D_ij = exp(G_i - G_j) for j <= i, else 0, and the state S
# before the chunk, the updates u of its positions solve
#
#     u_i + beta_i sum_(j < i) D_ij (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)
#
# (I + A) u = beta v - (beta exp(G) k) S with A strictly lower triangular. Both right sides but for S are known for all
# chunks at once: U = (I + A)^-1 beta v and W = (I + A)^-1 beta exp(G) k, so that u = U - W S. The loop over chunks has
# three products a chunk.


def chunked_delta_rule(
    inputs: DeltaInputs, *, chunk_size: int, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_delta_rule`."""
    length, groups = inputs.v.shape[1], inputs.k.shape[2]
    # A sequence shorter than a chunk is one chunk of its own length.
    size = min(chunk_size, length)
    q, k = (_chunks(x, size) for x in unit_queries_and_keys(inputs.q, inputs.k))  # [B, G, K, L, D]
    v, g, beta = (_chunks_of_groups(x.to(q.dtype), size, groups) for x in (inputs.v, inputs.g, inputs.beta))
    segments = None if segment_ids is None else chunk_segments(segment_ids, size)
    total = g.cumsum(-1)  # [B, G, R, K, L]
    decays = _decays_within(total, segments)  # [B, G, R, K, L, L]
    reach = total.exp()  # decay from before the chunk to behind each position
    to_end = (total[..., -1:] - total).exp()  # from behind each position to the end of the chunk
    over_chunk = reach[..., -1]
    if segments is not None:
        reach = reach * segments.from_before[:, None, None]
        to_end = to_end * segments.to_end[:, None, None]
        over_chunk = over_chunk * segments.over_chunk[:, None, None]
    k = k[:, :, None]  # [B, G, 1, K, L, D]: the value heads of a group share it
    # The diagonal of A is not read: `unitriangular` takes ones in its place.
    system = beta[..., None] * (k @ k.transpose(-1, -2)) * decays
    right = torch.cat((v * beta[..., None], k * (beta * reach)[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    updates, removed = solved.split((v.shape[-1], k.shape[-1]), -1)
    # [B, H, D, V] -> [B, G, R, D, V]; value heads of one key head are adjacent.
    start = None if state is None else state.to(q.dtype).unflatten(1, (groups, -1))
    before, updates, last = _through_chunks(updates, removed, k * to_end[..., None], over_chunk, start)
    q = q[:, :, None]
    scores = (q @ k.transpose(-1, -2)) * decays
    o = scores @ updates + (q * reach[..., None]) @ before  # [B, G, R, K, L, V]
    # -> [B, K L, G R, V]; positions that `_chunks` added are cut off.
    o = o.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2, 3)
    return o[:, :length].to(inputs.v.dtype), last.flatten(1, 2)


def _through_chunks(
    updates: Tensor, removed: Tensor, written: Tensor, over_chunk: Tensor, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """States before all chunks [B, G, R, K, D, V], the updates less what each state predicts [B, G, R, K, L, V], and
    the state after the last chunk [B, G, R, D, V].

    written [B, G, R, K, L, D]: keys, decayed to the end of their chunk.
    """
    shape = (*updates.shape[:3], removed.shape[-1], updates.shape[-1])
    state = updates.new_zeros(shape) if start is None else start
    before, corrected = [], []
    chunks = zip(*(x.unbind(3) for x in (updates, removed, written, over_chunk)), strict=True)
    for update, remove, write, kept in chunks:
        before.append(state)
        corrected.append(update - remove @ state)
        state = state * kept[..., None, None] + write.transpose(-1, -2) @ corrected[-1]
    return torch.stack(before, dim=3), torch.stack(corrected, dim=3), state


def _decays_within(total: Tensor, segments: ChunkSegments | None) -> Tensor:
    """exp(G_i - G_j) for positions i and j <= i of one chunk and segment, else 0: [B, G, R, K, L] -> [B, G, R, K, L,
    L]"""
    size = total.shape[-1]
    hidden = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    if segments is not None:
        hidden = hidden | segments.apart[:, None, None]
    # Masked before the exponential, which would overflow for positions ahead.
    return (total[..., :, None] - total[..., None, :]).masked_fill(hidden, float("-inf")).exp()


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, S, N, ...] -> [B, N, K, L, ...], with zeros at the end."""
    if missing := -x.shape[1] % size:
        x = F.pad(x, (0,) * (2 * (x.dim() - 2)) + (0, missing))
    return x.unflatten(1, (-1, size)).movedim(3, 1)


def _chunks_of_groups(x: Tensor, size: int, groups: int) -> Tensor:
    """[B, S, H, ...] -> [B, G, R, K, L, ...]"""
    return _chunks(x, size).unflatten(1, (groups, -1))
