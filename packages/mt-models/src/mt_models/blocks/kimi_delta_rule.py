"""Kimi delta attention (Moonshot AI, Kimi Linear, 2025): the gated delta rule with a decay of each channel of the keys.

For each head, with a state S [D, V] that maps keys to values and a decay g_t [D] in the exponent:

    S <- diag(exp(g_t)) S      u_t = beta_t (v_t - S^T k_t)      S <- S + k_t u_t^T      o_t = S^T q_t

Within a chunk of L positions, with G_i the sum of g up to position i, the products of keys k_i . k_j and of queries
with keys become sums over channels of k_i k_j exp(G_i - G_j). The exponents are taken of differences, which are never
above 0, for one chunk after the other: [B, H, L, L, D] numbers are in memory, of one chunk at a time.

Shapes: B batch, S positions, H heads, D channels of a query and key, V channels of a value. Everything is computed in
fp32, or in fp64 where the queries are fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mt_models.blocks.gated_delta_rule import DeltaInputs, unit_queries_and_keys


def recurrent_kimi_rule(
    inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """inputs: as of `recurrent_delta_rule`, with as many key heads as value heads and g [B, S, H, D].

    -> o [B, S, H, V] in the dtype of v, and the state [B, H, D, V] after the last position. state, segment_ids [B, S]:
    as of `recurrent_delta_rule`.
    """
    q, k, v, g, beta = _in_one_dtype(inputs)
    decay = g.exp()
    if segment_ids is not None:
        decay = decay * _continues(segment_ids)[..., None, None]
    state = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[3]) if state is None else state.to(q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, ..., None]
        read = (k[:, t, :, None] @ state).squeeze(-2)
        state = state + k[:, t, ..., None] * ((v[:, t] - read) * beta[:, t, :, None])[..., None, :]
        outputs.append((q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def chunked_kimi_rule(
    inputs: DeltaInputs, *, chunk_size: int, state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent_kimi_rule`."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in _in_one_dtype(inputs))  # [B, H, S, ...]
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if state is None else state.to(q.dtype)
    # Documents by numbers that count up, so that equal numbers are one document; the state is of number 0.
    documents = None if segment_ids is None else (~_continues(segment_ids)).cumsum(1)
    before = None if documents is None else torch.zeros_like(documents[:, 0])
    outputs = []
    for start in range(0, q.shape[2], chunk_size):
        span = slice(start, start + chunk_size)
        part = tuple(x[:, :, span] for x in (q, k, v, g, beta))
        chunk_documents = None if documents is None else documents[:, span]
        if torch.is_grad_enabled():
            o, state = checkpoint(_chunk, state, part, chunk_documents, before, use_reentrant=False)
        else:
            o, state = _chunk(state, part, chunk_documents, before)
        before = None if chunk_documents is None else chunk_documents[:, -1]
        outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2).to(inputs.v.dtype), state


def _chunk(
    state: Tensor, part: tuple[Tensor, ...], documents: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """state [B, H, D, V]; part: q and k [B, H, L, D], v [B, H, L, V], g [B, H, L, D], beta [B, H, L];
    documents [B, L], before [B]: that of the state -> o [B, H, L, V] and the state behind the chunk."""
    q, k, v, g, beta = part
    total = g.cumsum(2)
    reach, to_end = total.exp(), (total[:, :, -1:] - total).exp()
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    kept = total[:, :, -1].exp()
    if documents is not None:
        assert before is not None
        hidden = (hidden | (documents[:, :, None] != documents[:, None, :]))[:, None]  # [B, 1, L, L]
        reach = reach * (documents == before[:, None])[:, None, :, None]
        to_end = to_end * (documents == documents[:, -1:])[:, None, :, None]
        kept = kept * (documents[:, -1] == before)[:, None, None]
    # Masked before the exponential, which would overflow for positions ahead.
    decays = (total[:, :, :, None] - total[:, :, None]).masked_fill(hidden[..., None], float("-inf")).exp()
    decayed = k[:, :, None] * decays  # [B, H, L, L, D]: key j as position i sees it
    # The diagonal is not read: `unitriangular` takes ones in its place.
    system = beta[..., None] * torch.einsum("bhid,bhijd->bhij", k, decayed)
    right = beta[..., None] * (v - (k * reach) @ state)
    updates = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    o = torch.einsum("bhid,bhijd->bhij", q, decayed) @ updates + (q * reach) @ state
    return o, state * kept[..., None] + (k * to_end).transpose(-1, -2) @ updates


def _in_one_dtype(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    q, k = unit_queries_and_keys(inputs.q, inputs.k)
    return (q, k, *(x.to(q.dtype) for x in (inputs.v, inputs.g, inputs.beta)))


def _continues(segment_ids: Tensor) -> Tensor:
    """[B, S] bool: whether a position is of the document of the one before. The first continues a state."""
    return F.pad(segment_ids[:, 1:] == segment_ids[:, :-1], (1, 0), value=True)
