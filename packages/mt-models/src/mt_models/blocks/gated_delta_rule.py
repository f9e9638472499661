"""The gated delta rule (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024), one position after the other.

For each value head, with a state S [D, V] that maps keys to values:

    S <- exp(g_t) S          u_t = beta_t (v_t - S^T k_t)          S <- S + k_t u_t^T          o_t = S^T q_t

`mt_models.blocks.chunked_delta_rule` computes whole chunks of positions at once.

Shapes: B batch, S positions, G key heads, H value heads (G divides H; a key head serves R = H / G adjacent value
heads), D channels of a query and key, V channels of a value. Everything is computed in fp32, or in fp64 where the
queries are fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
