"""All-to-all, all-gather and reduce-scatter of uneven row counts, as autograd functions.

Axes of one rank communicate nothing. Gather and reduce-scatter of uneven sizes are implemented as all-to-alls: no
padding is sent, and the sum is taken in rank order, so that it is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import Axis, waiting


def gather_counts(counts: Tensor, axis: Axis) -> Tensor:
    """[n] of each rank -> [ranks, n]. Not differentiable."""
    return counts[None] if axis.size == 1 else all_gather(counts[None], 0, axis)


class AllToAll:
    """An asynchronous all-to-all along dimension 0: `wait(start(x))`, with other work between the two.

    send, receive: rows to and from each rank of the axis. The backward pass is the inverse all-to-all. The backward of
    `wait` launches it and the backward of `start` waits for it, so it overlaps with the other work's backward pass.
    """

    def __init__(self, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> None:
        self.axis, self.send, self.receive = axis, list(send), list(receive)
        self.work: dist.Work | None = None
        self.under_way: tuple[Tensor, ...] = ()
        """The send and the receive buffer, kept alive until the communication is done."""

    def start(self, x: Tensor) -> Tensor:
        """[rows to send, ...] -> receive buffer [rows to receive, ...], not to be read before `wait`."""
        return _Start.apply(x, self)

    def wait(self, arriving: Tensor) -> Tensor:
        return _Wait.apply(arriving, self)

    def begin(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        # [rows to send, ...], [rows to receive, ...]
        leaving, arriving = x.contiguous(), x.new_empty((sum(receive), *x.shape[1:]))
        self.work = dist.all_to_all_single(arriving, leaving, receive, send, group=self.axis.group, async_op=True)
        # async_op: without a reference the allocator could reuse the memory while NCCL reads and writes it.
        self.under_way = (leaving, arriving)
        return arriving

    def end(self) -> Tensor:
        """The received rows."""
        assert self.work is not None
        # With NCCL the current stream waits, not the host.
        with waiting(self.axis):
            self.work.wait()
        _, arrived = self.under_way
        self.work, self.under_way = None, ()
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: AllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(x, exchange.send, exchange.receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None  # the gradient given is still that of the rows received


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: AllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        # A new tensor object for autograd, with the same memory.
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: AllToAll = ctx.exchange
        exchange.begin(grads[0], exchange.receive, exchange.send)
        # The rows of grads[0] are on their way; the returned tensor stands for them until _Start.backward has waited.
        return grads[0], None


def all_to_all(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """[sum(send), ...] -> [sum(receive), ...]: the rows that each rank of the axis has for this one, by rank."""
    if axis.size == 1:
        return x
    exchange = AllToAll(axis, send, receive)
    return exchange.wait(exchange.start(x))


def gather_rows_of(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """[sizes[own rank], ...] -> [sum(sizes), ...]: the rows of all ranks, by rank. Backward sums their gradients."""
    if axis.size == 1:
        return x
    exchange, rows = start_gather(x, axis, sizes)
    return exchange.wait(rows)


def start_gather(x: Tensor, axis: Axis, sizes: Sequence[int]) -> tuple[AllToAll, Tensor]:
    """`gather_rows_of` under way: its exchange, and the rows that this exchange's `wait` takes."""
    # Every rank gets the same rows of this one: they are sent axis.size times.
    exchange = AllToAll(axis, [sizes[axis.rank]] * axis.size, sizes)
    return exchange, exchange.start(x.repeat(axis.size, *[1] * (x.dim() - 1)))


def sum_rows_to(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """[sum(sizes), ...] -> [sizes[own rank], ...]: this rank's rows, summed over ranks. The adjoint of the gather."""
    if axis.size == 1:
        return x
    num_rows = sizes[axis.rank]
    # [ranks * own, ...] -> [ranks, own, ...] -> [own, ...]
    return all_to_all(x, axis, sizes, [num_rows] * axis.size).unflatten(0, (axis.size, num_rows)).sum(0)
