"""This rank's queries and the keys that come to them: the part that is the same however the keys are sent.

Keys and values arrive packed, [T, B, G, D + E] (`packing`). `sources` are the ranks they belong to: this rank
alone (it has to be the first), or others that are all before it or all after it, laid end to end, with the rows
that `ShardedPattern.rows` lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_core.nn.context_parallel.blocks import BlockBackend, Softmax, pick_block_attention
from mt_core.nn.context_parallel.masks import BlockMask, ShardedPattern


def pack(k: Tensor, v: Tensor) -> Tensor:
    """k [B, G, T, D] and v [B, G, T, E] -> [T, B, G, D + E]: one message, any run of tokens contiguous."""
    return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=-1)


def unpack(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of pack, as views; head_dim is D."""
    k, v = kv.permute(1, 2, 0, 3).split((head_dim, kv.shape[-1] - head_dim), dim=-1)
    return k, v


class ForwardPass:
    """The softmax of queries q [B, N, 2c, D] over the keys added so far."""

    def __init__(self, q: Tensor, pattern: ShardedPattern, backend: BlockBackend) -> None:
        self.q = q
        self.pattern = pattern
        self.backend = backend
        self.result: Softmax | None = None

    def add(self, sources: Sequence[int], kv: Tensor) -> None:
        # rows: all queries of this rank, or its late chunk alone for keys of ranks behind it.
        rows, mask = block_of(self.pattern, sources)
        q, (k, v) = self.q[:, :, rows], unpack(kv, self.q.shape[-1])
        out, lse = pick_block_attention(q, v, mask, self.backend).forward(q, k, v, mask)
        if self.result is None:  # the own block
            self.result = Softmax(out, lse)
        else:
            self.result.add(rows, out, lse)

    def finish(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out [B, N, 2c, E] in q's dtype, lse [B, N, 2c]. sinks [N]: a block of one key each, whose value is 0."""
        assert self.result is not None
        if sinks is not None:
            scores = sinks.to(self.result.lse.dtype)[None, :, None].expand_as(self.result.lse)
            # With the value 0 it only adds exp(sink) to the denominator.
            self.result.add(slice(None), torch.zeros_like(self.result.out), scores)
        return self.result.out.to(self.q.dtype), self.result.lse


class BackwardPass:
    """Gradients, given that of the result and what the forward pass ended with. Sums dq in dq's own fp32."""

    def __init__(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, pattern: ShardedPattern, backend: BlockBackend
    ) -> None:
        # A query that saw no key at all: exp(score - inf) makes its probabilities 0 rather than NaN.
        self.parts = (grad, q, out, lse.masked_fill(lse.isneginf(), torch.inf))
        self.pattern = pattern
        self.backend = backend
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def add(self, sources: Sequence[int], kv: Tensor) -> Tensor:
        """-> the gradient of kv, packed likewise, in its dtype"""
        rows, mask = block_of(self.pattern, sources)
        grad, q, out, lse = (x[:, :, rows] for x in self.parts)
        k, v = unpack(kv, q.shape[-1])
        # The same choice as in the forward pass: lse has to be that kernel's convention.
        attention = pick_block_attention(q, v, mask, self.backend)
        dq, dk, dv = attention.backward(grad, q, k, v, out, lse, mask)
        # In fp32: a sum over CP blocks.
        self.dq[:, :, rows] += dq
        return pack(dk, dv)

    def sink_gradient(self, sinks: Tensor | None) -> Tensor | None:
        """[N], of this rank's queries: a score whose value is 0 has the gradient -p (dout . out)."""
        if sinks is None:
            return None
        grad, _, out, lse = self.parts
        weights = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
        products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, N, 2c]
        return -(weights * products).sum((0, 2)).to(sinks.dtype)


def block_of(pattern: ShardedPattern, sources: Sequence[int]) -> tuple[slice, BlockMask]:
    """Rows of this rank's queries that see keys of the sources, and how."""
    own = pattern.axis.rank
    if list(sources) == [own]:
        return slice(0, 2 * pattern.chunk), pattern.own_mask()
    return pattern.rows(sources[0], own)[0], pattern.mask(sources)
