"""Point-to-point (ring) context parallelism: keys and values are sent between ranks, queries stay.

In step i = 1 ... CP - 1 a rank receives the keys and values of the rank i places before it, straight from their
owner, while it computes the block of step i - 1 (in step 0 its own, which needs no transfer):

    computes          own       r - 1      r - 2      ...
    receives         r - 1      r - 2      r - 3      ...
    sends to         r + 1      r + 2      r + 3      ...

Handing blocks on from neighbour to neighbour would take as many steps, but every rank would have to pass on what
only later ones read. From the owner each gets just the rows that its queries see (`visible_rows`): under a causal
mask, one chunk of a rank before it and two of a rank after it, which is the least that can be sent.

Backward goes round again. The gradients of another rank's keys and values go straight back to their owner, while
the next block is computed, and are summed there in fp32: each is rounded once, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.nn.context_parallel.blocks import BackwardPass, BlockBackend, ForwardPass, pack, unpack
from mt_core.nn.context_parallel.masks import ShardedPattern
from mt_core.parallel.context import Axis, waiting


@dataclass
class Transfer:
    """A send and a receive in flight; both buffers are kept alive until they complete."""

    sent: Tensor
    received: Tensor
    works: list[Any]
    axis: Axis

    def wait(self) -> Tensor:
        with waiting(self.axis):
            for work in self.works:
                work.wait()
        return self.received


def exchange(axis: Axis, sent: Tensor, target: int, source: int, rows: int) -> Transfer:
    """Start to send `sent` [T, ...] to one rank of the axis and to receive [rows, ...] from another.

    All ranks call it in the same order, so that messages between the same two ranks cannot be mistaken.
    """
    received = sent.new_empty((rows, *sent.shape[1:]))
    operations = [
        dist.P2POp(dist.isend, sent, axis.ranks[target], axis.group),
        dist.P2POp(dist.irecv, received, axis.ranks[source], axis.group),
    ]
    # Batched: with NCCL, separate sends and receives could wait for each other in a cycle of ranks.
    return Transfer(sent, received, dist.batch_isend_irecv(operations), axis)


class Rounds:
    """The communication partners of each step, and the transfers. kv: packed, [2c, B, G, D + E]."""

    def __init__(self, pattern: ShardedPattern) -> None:
        self.pattern = pattern
        self.axis = pattern.axis

    def source(self, step: int) -> int:
        """The rank whose keys this one reads."""
        return (self.axis.rank - step) % self.axis.size

    def reader(self, step: int) -> int:
        """The rank that reads this one's keys."""
        return (self.axis.rank + step) % self.axis.size

    def shown_rows(self, step: int) -> slice:
        """Rows of this rank's keys that the reader of a step sees."""
        return self.pattern.rows(self.axis.rank, self.reader(step))[1]

    def read_rows(self, step: int) -> slice:
        """Rows of the source's keys that this rank sees."""
        return self.pattern.rows(self.source(step), self.axis.rank)[1]

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(source, its visible rows) in every step; the next block is on its way while one is used."""
        received = kv
        for step in range(self.axis.size):
            # Before the yield: the transfer runs while the caller computes the block.
            transfer = self._start_block(step + 1, kv) if step + 1 < self.axis.size else None
            yield self.source(step), received
            if transfer is not None:
                received = transfer.wait()

    def _start_block(self, step: int, kv: Tensor) -> Transfer:
        sent, rows = kv[self.shown_rows(step)], length(self.read_rows(step))
        return exchange(self.axis, sent, self.reader(step), self.source(step), rows)

    def start_return(self, step: int, dkv: Tensor) -> Transfer:
        """Send the gradient of the keys and values read in a step to their owner; receive that of the rows sent."""
        return exchange(self.axis, dkv, self.source(step), self.reader(step), length(self.shown_rows(step)))


def length(rows: slice) -> int:
    return int(rows.stop - rows.start)


class PointToPointAttention(torch.autograd.Function):
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
        for source, block in Rounds(pattern).blocks(kv):
            queries.add([source], block)
        out, lse = queries.finish(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.pattern, ctx.backend = pattern, backend
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        queries = BackwardPass(grads[0], q, out, lse, ctx.pattern, ctx.backend)
        dkv = circulate(queries, kv, Rounds(ctx.pattern), lse.dtype)
        dk, dv = unpack(dkv.to(kv.dtype), q.shape[-1])
        return queries.dq.to(q.dtype), dk, dv, queries.sink_gradient(sinks), None, None


def circulate(queries: BackwardPass, kv: Tensor, rounds: Rounds, dtype: torch.dtype) -> Tensor:
    """The gradient of this rank's kv, summed in `dtype` over all ranks that read it."""
    dkv = torch.zeros_like(kv, dtype=dtype)
    homeward: Transfer | None = None
    # CP = 4, each step: receive the next keys | compute | wait for the gradient sent back before | send this one back.
    for step, (source, block) in enumerate(rounds.blocks(kv)):
        dblock = queries.add([source], block)
        if step == 0:
            # Step 0 is the own block, whole.
            dkv += dblock
            continue
        if homeward is not None:
            # One gradient in flight: its buffers are freed here, and the next one starts behind it.
            dkv[rounds.shown_rows(step - 1)] += homeward.wait()
        homeward = rounds.start_return(step, dblock)
    if homeward is not None:
        dkv[rounds.shown_rows(rounds.axis.size - 1)] += homeward.wait()
    return dkv
