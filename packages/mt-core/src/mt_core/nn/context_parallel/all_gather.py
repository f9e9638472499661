"""Context parallel by gathering: every rank gets all keys and values, in one collective.

Simple, and for few key-value heads (grouped queries) cheap; nothing is computed meanwhile, and a rank holds the
keys of the whole sequence while it works. It does not keep them: backward gathers them again, and then
reduce-scatters their gradients.

The gathered shards need not be put in the order of the sequence. A causal mask leaves two rectangles besides the
rank's own square: the early chunks of the ranks before it, and all that the ranks after it hold. In a rectangle
the order of keys means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.nn.context_parallel.blocks import BackwardPass, BlockBackend, ForwardPass, pack, unpack
from mt_core.nn.context_parallel.masks import ShardedPattern
from mt_core.parallel.context import Axis, waiting
from mt_core.parallel.reductions import reduce_scatter_into


class AllGatherAttention(torch.autograd.Function):
    """q [B, N, 2c, D], k [B, G, 2c, D], v [B, G, 2c, E] of this rank, sinks [N] or None -> [B, N, 2c, E]"""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        pattern: ShardedPattern,
        backend: BlockBackend,
    ) -> Tensor:
        kv, queries = pack(k, v), ForwardPass(q, pattern, backend)
        shards = gather(kv, pattern.axis)
        # The own keys first: Softmax starts from a block that holds every query.
        for sources in groups_of_sources(pattern.axis):
            # [sources, rows, ...] -> [sources * rows, ...]: the ranks' keys laid end to end, one call for all of them.
            queries.add(sources, visible(shards, sources, pattern).flatten(0, 1))
        out, lse = queries.finish(sinks)
        # This rank's keys alone.
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.pattern, ctx.backend = pattern, backend
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        pattern = ctx.pattern
        queries = BackwardPass(grads[0], q, out, lse, pattern, ctx.backend)
        shards = gather(kv, pattern.axis)
        # Zeros: rows that this rank does not see have no gradient, and are summed all the same.
        dshards = torch.zeros_like(shards)
        for sources in groups_of_sources(pattern.axis):
            keys = visible(shards, sources, pattern)
            visible(dshards, sources, pattern).copy_(queries.add(sources, keys.flatten(0, 1)).view(keys.shape))
        dkv = torch.empty_like(kv)
        # Summed in the dtype of kv, unlike p2p, which sums in fp32.
        reduce_scatter_into(dkv, dshards.flatten(0, 1), pattern.axis)
        dk, dv = unpack(dkv, q.shape[-1])
        return queries.dq.to(q.dtype), dk, dv, queries.sink_gradient(sinks), None, None


def gather(kv: Tensor, axis: Axis) -> Tensor:
    """[2c, ...] of this rank -> [CP, 2c, ...]"""
    shards = kv.new_empty((axis.size, *kv.shape))
    with waiting(axis):
        dist.all_gather_into_tensor(shards.flatten(0, 1), kv, group=axis.group)
    return shards


def groups_of_sources(axis: Axis) -> list[range]:
    """This rank, the ranks before it and those after it, as far as there are any."""
    groups = [range(axis.rank, axis.rank + 1), range(axis.rank), range(axis.rank + 1, axis.size)]
    return [group for group in groups if len(group)]


def visible(shards: Tensor, sources: range, pattern: ShardedPattern) -> Tensor:
    """[CP, 2c, ...] -> a view of the rows that this rank sees of the sources: [sources, rows, ...]"""
    chosen = shards[sources.start : sources.stop]
    is_own = sources.start == pattern.axis.rank
    # Ranks on one side show the same rows, so the first of them stands for all.
    return chosen if is_own else chosen[:, pattern.rows(sources.start, pattern.axis.rank)[1]]
