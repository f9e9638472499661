"""The gated delta rule over whole chunks of positions, with its gradients by hand.

Within a chunk the updates solve a triangular system; between chunks there are the states at their ends. With G_i the
sum of g over the positions of a chunk up to i, D_ij = exp(G_i - G_j) for j <= i, else 0, and the state S before the
chunk, the updates u of its positions solve

    u_i + beta_i sum_(j < i) D_ij (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

(I + A) u = beta v - (beta exp(G) k) S with A strictly lower triangular. With X = (I + A)^-1, U = X beta v and
W = X beta exp(G) k are known for all chunks at once, and u = U - W S. The loop over chunks has two products a chunk.

Backward: with du the gradient of the updates of a chunk, y = X^T du is that of the right side and -y u^T, below the
diagonal, that of A. Gradients of D_ij, exp(G_i) and of the decays to a chunk's end meet in that of G.

Shapes: those of `mt_models.blocks.gated_delta_rule`; K chunks of L positions. Chunks are the first dimension of all
tensors, so that those of one chunk are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_models.blocks.chunk_segments import ChunkSegments, chunk_segments
from mt_models.blocks.gated_delta_rule import L2_EPSILON, DeltaInputs


def chunked_delta_rule(
    inputs: DeltaInputs, *, chunk_size: int, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_delta_rule`. Its gradients cannot be differentiated again."""
    # A sequence shorter than a chunk is one chunk of its own length.
    size = min(chunk_size, inputs.v.shape[1])
    segments = None if segment_ids is None else chunk_segments(segment_ids, size)
    outputs: tuple[Tensor, Tensor] = _ChunkedDeltaRule.apply(*inputs, state, size, segments)
    return outputs


class _ChunkedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        size: int,
        segments: ChunkSegments | None,
    ) -> tuple[Tensor, Tensor]:
        dtype, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        unit_q, q_scale = _unit(_chunks(q, size, dtype), q.shape[-1] ** -0.5)
        unit_k, k_scale = _unit(_chunks(k, size, dtype), 1.0)
        values, rates, logs = (_chunks(x, size, dtype).unflatten(2, (groups, -1)) for x in (v, beta, g))
        decays = _decays(logs, segments)
        start = None if state is None else state.to(dtype).unflatten(1, (groups, -1))
        solved = _solved(unit_k, values, rates, decays)
        before, last, updates = _through_chunks(solved, unit_k, decays, start)
        scores = (unit_q @ unit_k.mT)[:, :, :, None] * decays.within
        o = scores @ updates + (unit_q[:, :, :, None] * decays.reach[..., None]) @ before
        for_rule = (unit_q, unit_k, values, rates, *solved[:2], updates, scores, before)
        ctx.save_for_backward(q_scale, k_scale, *decays, *for_rule)
        ctx.shape, ctx.dtypes = v.shape, tuple(x.dtype for x in (q, k, v, g, beta))
        ctx.state_dtype = None if state is None else state.dtype
        ctx.set_materialize_grads(False)
        return _positions(o.flatten(2, 3), v.shape[1]).to(v.dtype), last.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q_scale, k_scale, within, reach, to_end, over_chunk, *rest = ctx.saved_tensors
        saved = Saved(Decays(within, reach, to_end, over_chunk), *rest)
        unit_q, unit_k = saved.q, saved.k
        groups, size = unit_k.shape[2:4]
        do = unit_q.new_zeros(ctx.shape) if grads[0] is None else grads[0]
        do = _chunks(do, size, unit_q.dtype).unflatten(2, (groups, -1))
        dlast = torch.zeros_like(saved.before[0])
        if grads[1] is not None:
            dlast = grads[1].to(do.dtype).unflatten(1, (groups, -1))
        dq, dk, dv, dg, dbeta, dstate = _gradients(saved, do, dlast)
        parts = (
            _of_length(dq, unit_q, q_scale, unit_q.shape[-1]),
            _of_length(dk, unit_k, k_scale, 1),
            *(x.flatten(2, 3) for x in (dv, dg, dbeta)),
        )
        inputs = (_positions(x, ctx.shape[1]).to(dtype) for x, dtype in zip(parts, ctx.dtypes, strict=True))
        return *inputs, None if ctx.state_dtype is None else dstate.flatten(1, 2).to(ctx.state_dtype), None, None


# -- forward -------------------------------------------------------------------------------------------


class Decays(NamedTuple):
    within: Tensor
    """D [K, B, G, R, L, L]: exp(G_i - G_j) for positions i and j <= i of one chunk and segment, else 0."""
    reach: Tensor
    """[K, B, G, R, L]: from before the chunk to behind each position."""
    to_end: Tensor
    """[K, B, G, R, L]: from behind each position to the end of the chunk."""
    over_chunk: Tensor
    """[K, B, G, R]"""


class Solved(NamedTuple):
    inverse: Tensor
    """X [K, B, G, R, L, L]"""
    removed: Tensor
    """W [K, B, G, R, L, D]"""
    updates: Tensor
    """U [K, B, G, R, L, V]"""


class Saved(NamedTuple):
    """What the gradients are computed from."""

    decays: Decays
    q: Tensor
    """[K, B, G, L, D], of length D ** -0.5; k of length 1."""
    k: Tensor
    v: Tensor
    """[K, B, G, R, L, V]"""
    beta: Tensor
    """[K, B, G, R, L]"""
    inverse: Tensor
    removed: Tensor
    updates: Tensor
    """u [K, B, G, R, L, V]"""
    scores: Tensor
    """[K, B, G, R, L, L]: q . k times D."""
    before: Tensor
    """[K, B, G, R, D, V]: states before the chunks."""


def _unit(x: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """x with the length given, and the factor [..., 1] that it was multiplied by."""
    scale = (x.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt_() * length
    return x * scale, scale


def _decays(g: Tensor, segments: ChunkSegments | None) -> Decays:
    """g [K, B, G, R, L]"""
    total = g.cumsum(-1)
    size = total.shape[-1]
    hidden = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    if segments is not None:
        hidden = hidden | segments.apart.transpose(0, 1)[:, :, None, None]
    # Masked before the exponential, which would overflow for positions ahead.
    within = (total[..., :, None] - total[..., None, :]).masked_fill_(hidden, float("-inf")).exp_()
    reach, to_end = total.exp(), (total[..., -1:] - total).exp_()
    over_chunk = reach[..., -1].clone()
    if segments is not None:
        from_before, kept, over = (
            x.transpose(0, 1)[:, :, None, None] for x in (segments.from_before, segments.to_end, segments.over_chunk)
        )
        reach, to_end, over_chunk = reach * from_before, to_end * kept, over_chunk * over
    return Decays(within, reach, to_end, over_chunk)


def _solved(k: Tensor, v: Tensor, beta: Tensor, decays: Decays) -> Solved:
    system = ((k @ k.mT)[:, :, :, None] * decays.within).mul_(beta[..., None])
    identity = torch.eye(k.shape[3], dtype=k.dtype, device=k.device).expand_as(system)
    # The diagonal of the system is not read: `unitriangular` takes ones in its place.
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    removed = inverse @ (k[:, :, :, None] * (beta * decays.reach)[..., None])
    return Solved(inverse, removed, inverse @ (v * beta[..., None]))


def _through_chunks(solved: Solved, k: Tensor, decays: Decays, start: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """States before all chunks [K, B, G, R, D, V] and behind the last [B, G, R, D, V], and the updates u."""
    written = (k[:, :, :, None] * decays.to_end[..., None]).flatten(1, 3).mT  # [K, B H, D, L]
    updates, removed, over_chunk = (x.flatten(1, 3) for x in (solved.updates, solved.removed, decays.over_chunk))
    heads = decays.over_chunk.shape[1:]
    state = k.new_zeros(len(written[0]), k.shape[-1], updates.shape[-1]) if start is None else start.flatten(0, 2)
    before, corrected = [], []
    for update, remove, write, kept in zip(updates, removed, written, over_chunk[..., None, None], strict=True):
        before.append(state)
        corrected.append(torch.baddbmm(update, remove, state, alpha=-1.0))
        state = torch.baddbmm(state * kept, write, corrected[-1])
    before, corrected = (torch.stack(parts).unflatten(1, heads) for parts in (before, corrected))
    return before, state.unflatten(0, heads), corrected


# -- backward ------------------------------------------------------------------------------------------


def _gradients(saved: Saved, do: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
    """Those of q, k (as they are in `saved`), v, g, beta and of the state before the first chunk."""
    decays, q, k, v, beta, inverse, _, updates, scores, before = saved
    reach = decays.reach[..., None]
    dupdates, dbehind, dstate = _back_through_chunks(saved, do, dlast)
    dright = inverse.mT @ dupdates
    # Of the products of keys with keys and of queries with keys, but for the factor D.
    dsystem = (dright @ updates.mT).mul_(decays.within).neg_()
    dsystem.diagonal(dim1=-2, dim2=-1).zero_()
    dscores = do @ updates.mT
    along = dscores * scores
    dproducts = dscores.mul_(decays.within).sum(3)  # [K, B, G, L, L]: of q . k
    of_beta = dsystem * (k @ k.mT)[:, :, :, None]
    dbeta = of_beta.sum(-1)
    along.addcmul_(of_beta, beta[..., None])
    dkeys = dsystem.mul_(beta[..., None]).sum(3)  # of k . k
    dtotal = along.sum(-1) - along.sum(-2)
    # What positions read of the state before the chunk: queries, and keys on the right side.
    dread = (do @ before.mT).mul_(reach)
    looked = dright @ before.mT
    along_keys = (looked * k[:, :, :, None]).sum(-1)
    dbeta += (dright * v).sum(-1) - decays.reach * along_keys
    dtotal += (dread * q[:, :, :, None]).sum(-1) - beta * decays.reach * along_keys
    # What they write into the state behind it.
    dwritten = (updates @ dbehind.mT).mul_(decays.to_end[..., None])
    to_end = (dwritten * k[:, :, :, None]).sum(-1)
    dtotal -= to_end
    dtotal[..., -1] += to_end.sum(-1) + decays.over_chunk * (dbehind * before).sum((-2, -1))
    dwritten.addcmul_(looked, (beta * decays.reach)[..., None], value=-1.0)
    dk = dwritten.sum(3) + (dkeys + dkeys.mT) @ k + dproducts.mT @ q
    dq = dread.sum(3) + dproducts @ k
    dg = dtotal.flip(-1).cumsum(-1).flip(-1)  # g_i enters G_i and all behind it
    return dq, dk, dright * beta[..., None], dg, dbeta, dstate


def _back_through_chunks(saved: Saved, do: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the updates [K, B, G, R, L, V], of the states behind the chunks [K, B, G, R, D, V], and of that
    before the first."""
    decays, heads = saved.decays, dlast.shape[:3]
    dupdates = saved.scores.mT @ do
    read = (saved.q[:, :, :, None] * decays.reach[..., None]).mT @ do
    written = saved.k[:, :, :, None] * decays.to_end[..., None]
    every = (dupdates, read, written, saved.removed, decays.over_chunk[..., None, None])
    dstate, behind, complete = dlast.flatten(0, 2), [], []
    chunks = zip(*(x.flatten(1, 3) for x in every), strict=True)
    for dupdate, reads, write, removed, kept in reversed(list(chunks)):
        behind.append(dstate)
        complete.append(torch.baddbmm(dupdate, write, dstate))
        dstate = torch.baddbmm(torch.addcmul(reads, dstate, kept), removed.mT, complete[-1], alpha=-1.0)
    dupdates, behind = (torch.stack(parts[::-1]).unflatten(1, heads) for parts in (complete, behind))
    return dupdates, behind, dstate.unflatten(0, heads)


def _of_length(dunit: Tensor, unit: Tensor, scale: Tensor, inverse_square: float) -> Tensor:
    """Gradient of x from that of `_unit`: scale (du - u (u . du) / length^2)."""
    along = (dunit * unit).sum(-1, keepdim=True)
    return (dunit - unit * (along * inverse_square)) * scale


# -- positions and chunks --------------------------------------------------------------------------------


def _chunks(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[B, S, N, ...] -> [K, B, N, L, ...], contiguous, with zeros at the end."""
    if missing := -x.shape[1] % size:
        x = F.pad(x, (0,) * (2 * (x.dim() - 2)) + (0, missing))
    chunks = x.unflatten(1, (-1, size)).movedim(3, 1).movedim(2, 0)  # [B, K, L, N, ...] -> [B, N, K, L, ...] -> ...
    return chunks.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _positions(x: Tensor, length: int) -> Tensor:
    """[K, B, N, L, ...] -> [B, S, N, ...], contiguous; positions that `_chunks` added are cut off."""
    return x.movedim(0, 1).movedim(2, 3).flatten(1, 2)[:, :length]
