"""Attention of some queries on some keys, in a form that adds up: results with the log-sum-exp of their scores.

For a block of keys let s_ij = q_i . k_j / sqrt(D) + bias_ij. Its result and log-sum-exp are

    lse_i = log sum_j exp(s_ij)        out_i = sum_j exp(s_ij - lse_i) v_j

and two blocks merge by weight: lse = log(exp(lse_a) + exp(lse_b)), out = sum over both of exp(lse_x - lse) out_x
(`Softmax.add`). Merged over all blocks, out and lse are those of the softmax over all keys. Backward needs no
merging: with the final lse a block has its probabilities p_ij = exp(s_ij - lse_i), and

    dv_j = sum_i p_ij dout_i    ds_ij = p_ij (dout_i . v_j - dout_i . out_i)    dq_i = sum_j ds_ij k_j / sqrt(D)

(dk likewise) are sums over blocks. A query that sees no key of a block has lse -inf there, out 0, and weight 0.

Shapes: q [B, N, S, D]; k [B, G, T, D] and v [B, G, T, E], each group for N / G heads; out [B, N, S, E]; lse
[B, N, S] in fp32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_core import _torch_compat
from mt_core.nn.context_parallel.masks import BlockMask, ShardedPattern

BlockBackend = Literal["auto", "math"]
"""math: written out in fp32, an S x T tensor at a time. auto: torch's kernels where one serves, on Hopper and later
cuDNN's, else flash attention."""


@dataclass(frozen=True)
class BlockAttention:
    """forward: (q, k, v, mask) -> out, lse. backward: (dout, q, k, v, out, lse, mask) -> dq, dk, dv."""

    forward: Callable[[Tensor, Tensor, Tensor, BlockMask], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, BlockMask], tuple[Tensor, Tensor, Tensor]]


def pick_block_attention(q: Tensor, v: Tensor, mask: BlockMask, backend: BlockBackend) -> BlockAttention:
    """The fastest that serves these tensors. It depends on nothing that differs between forward and backward."""
    # Latent attention has wider queries than values, which torch's flash kernels do not take.
    if backend == "math" or q.shape[-1] != v.shape[-1]:
        return MATH
    if q.device.type == "cpu":
        return FLASH_CPU
    if q.device.type != "cuda" or mask.bias is not None:
        return MATH
    if _torch_compat.cudnn_serves(q):
        return CUDNN
    return FLASH_CUDA if _torch_compat.flash_cuda_serves(q) else MATH


class Softmax:
    """The running result over the blocks seen so far, in fp32 or wider."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """From the first block, which has to hold every query; its tensors are changed in place."""
        self.out = out.to(lse.dtype)
        self.lse = lse

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a block that holds some rows of the queries."""
        known, known_lse = self.out[:, :, rows], self.lse[:, :, rows]
        total = torch.logaddexp(known_lse, lse)  # [B, N, rows]
        reference = total.masked_fill(total.isneginf(), 0.0)  # exp(-inf - 0) = 0 where no block is seen yet
        known.mul_(torch.exp(known_lse - reference)[..., None])
        known.addcmul_(out.to(known.dtype), torch.exp(lse - reference)[..., None])
        known_lse.copy_(total)


# -- written out -----------------------------------------------------------------------------------


def math_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """q [B, N, S, D], k [B, G, T, D], v [B, G, T, E] -> out [B, N, S, E] in q's dtype, lse [B, N, S]"""
    scores = _scores(q, k, mask)  # [B, G, N / G, S, T]
    lse = scores.logsumexp(-1)
    reference = lse.masked_fill(lse.isneginf(), 0.0)
    weights = torch.exp(scores - reference[..., None])  # [B, G, N / G, S, T], sums to 1 over the keys
    out = torch.einsum("bghst,bgte->bghse", weights, v.to(weights.dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk and dv, in the dtypes of q, k and v. out and lse: of the whole softmax."""
    scale, groups = 1 / math.sqrt(q.shape[-1]), k.shape[1]
    scores = _scores(q, k, mask)
    queries, grads, outs = (_by_group(x.to(scores.dtype), groups) for x in (q, grad, out))
    keys, values = k.to(scores.dtype), v.to(scores.dtype)
    # lse is that of the whole softmax: the probabilities of this block among all keys.
    weights = torch.exp(scores - _by_group(lse, groups)[..., None])
    dv = torch.einsum("bghst,bghse->bgte", weights, grads)
    dweights = torch.einsum("bghse,bgte->bghst", grads, values)
    dscores = weights * (dweights - (grads * outs).sum(-1, keepdim=True)) * scale  # [B, G, N / G, S, T]
    dq = torch.einsum("bghst,bgtd->bghsd", dscores, keys).flatten(1, 2)
    dk = torch.einsum("bghst,bghsd->bgtd", dscores, queries)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, mask: BlockMask) -> Tensor:
    """[B, G, N / G, S, T] in fp32 or wider"""
    groups, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bghsd,bgtd->bghst", _by_group(q.to(dtype), groups), k.to(dtype)) / math.sqrt(q.shape[-1])
    if mask.causal:
        # A causal block is square: the rank's own queries and keys.
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(hidden, -math.inf)
    if mask.bias is None:
        return scores
    # [B or 1, N or 1, S, T] -> [B or 1, G or 1, N / G or 1, S, T]
    return scores + (_by_group(mask.bias, groups) if mask.bias.shape[1] > 1 else mask.bias[:, :, None])


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, N, ...] -> [B, G, N / G, ...]"""
    return x.unflatten(1, (groups, x.shape[1] // groups))


# -- torch's kernels -----------------------------------------------------------------------


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    out, lse = _torch_compat.flash_cpu_forward(q, k, v, mask.causal, _bias_for(q, mask))
    if mask.bias is not None:  # this kernel gives rows without a key lse 0
        lse = lse.masked_fill(mask.bias.isneginf().all(-1), -math.inf)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    return _torch_compat.flash_cpu_backward(grad, q, k, v, out, lse, mask.causal, _bias_for(q, mask))


def _bias_for(q: Tensor, mask: BlockMask) -> Tensor | None:
    return None if mask.bias is None else mask.bias.to(torch.promote_types(q.dtype, torch.float32))


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    return _torch_compat.flash_cuda_forward(q, k, v, mask.causal)


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    return _torch_compat.flash_cuda_backward(grad, q, k, v, out, lse, mask.causal)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    return _torch_compat.cudnn_forward(q, k, v, mask.causal)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    return _torch_compat.cudnn_backward(grad, q, k, v, out, lse, mask.causal)


MATH = BlockAttention(math_forward, math_backward)
FLASH_CPU = BlockAttention(_cpu_forward, _cpu_backward)
FLASH_CUDA = BlockAttention(_cuda_forward, _cuda_backward)
CUDNN = BlockAttention(_cudnn_forward, _cudnn_backward)


# -- passes of this rank's queries over the keys that come to them, however the keys are sent --------------
#
# Keys and values arrive packed, [T, B, G, D + E] (`pack`). `sources` are the ranks they belong to: this rank
# alone (it has to be the first), or others that are all before it or all after it, laid end to end, with the rows
# that `ShardedPattern.rows` lists.


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
    rank = pattern.axis.rank
    if list(sources) == [rank]:
        return slice(0, 2 * pattern.chunk), pattern.own_mask()
    return pattern.rows(sources[0], rank)[0], pattern.mask(sources)
