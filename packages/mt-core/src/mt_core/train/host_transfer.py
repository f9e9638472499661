"""Asynchronous transfer of device scalars to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import Axis, ParallelContext


@dataclass(frozen=True)
class HostTransfer:
    """Values being copied to the host. done: event recorded after the copy; None on CPU."""

    values: Tensor
    done: torch.cuda.Event | None

    @classmethod
    def start(cls, values: Tensor) -> HostTransfer:
        """values: [n], on any device"""
        if values.device.type == "cpu":
            return cls(values, None)
        # A copy to pageable memory would make the host wait for the device.
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(pinned, done)

    def result(self) -> list[float]:
        """Waits for this copy only, not for work launched after it."""
        if self.done is not None:
            self.done.synchronize()
        return list(self.values.tolist())


class DelayedAllReduceFlag:
    """Whether a flag is set on any rank of an axis, reported one call late: each call returns the result of the call
    before it, and the first returns False.

    Collective. It never waits for device work that was launched since the previous call. On an axis of one rank the
    flag is returned at once.
    """

    def __init__(self, ctx: ParallelContext, axis: Axis) -> None:
        self.ctx, self.axis = ctx, axis
        self._previous: HostTransfer | None = None

    def __call__(self, flag: bool) -> bool:
        if self.axis.size == 1:
            return flag
        # Launched before the previous result is read, which may wait for the device.
        previous, total = self._previous, all_reduce(device_scalar(float(flag), self.ctx), self.axis)
        self._previous = HostTransfer.start(total.view(1))
        return previous is not None and previous.result()[0] > 0


def device_scalar(number: float | Tensor, ctx: ParallelContext) -> Tensor:
    """[] fp64 in new memory. A host number is passed as a kernel argument, which needs no synchronous copy."""
    return torch.zeros((), dtype=torch.float64, device=ctx.device) + number


def sum_of_host_numbers(numbers: Sequence[float], axis: Axis, ctx: ParallelContext) -> Sequence[float | Tensor]:
    """Sums over an axis, [] fp64 on the device; the numbers themselves, on the host, if the axis has one rank."""
    if axis.size == 1:
        return numbers
    return all_reduce(torch.stack([device_scalar(number, ctx) for number in numbers]), axis).unbind()


def sum_on_device(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else all_reduce(x, axis)
