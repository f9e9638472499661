"""Losses that layers add, over the micro-batches and ranks of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import Axis, ParallelContext


class AuxiliaryMeans:
    """Of all pipeline stages: means over the micro-batches of all data-parallel ranks.

    Making it is collective over the stages, which tell each other the names of their losses.
    """

    def __init__(self, own: Sequence[AuxiliaryLoss], ctx: ParallelContext) -> None:
        self.own, self.ctx = {loss.name: loss for loss in own}, ctx
        self.names = _names_on_all_stages(list(self.own), ctx.pp)

    def begin(self, passes: int, scale: float = 1.0) -> None:
        """passes: micro-batches of the step. scale: of the loss whose gradients these join."""
        for auxiliary in self.own.values():
            auxiliary.scale = scale / (passes * self.ctx.dp.size)

    def take(self, passes: int) -> list[Tensor]:
        """[] fp64 on the device for each name, without the scale. Nothing waits for the device."""
        if not self.names:
            return []
        totals = {name: loss.take_on_device() for name, loss in self.own.items()}
        own = [totals.get(name) for name in self.names]
        means = torch.stack([on_device(0.0 if total is None else total, self.ctx) for total in own]) / passes
        return list(sum_on_device(sum_on_device(means / self.ctx.dp.size, self.ctx.dp), self.ctx.pp))


def _names_on_all_stages(own: list[str], pp: Axis) -> list[str]:
    """In the order of the stages. No two of them have a loss of one name."""
    if pp.size == 1:
        return own
    everyone: list[list[str] | None] = [None] * pp.size
    dist.all_gather_object(everyone, own, group=pp.group)
    return [name for held in everyone for name in held or []]


def on_device(number: float | Tensor, ctx: ParallelContext) -> Tensor:
    """[] fp64, in new memory. A number on the host travels as an argument of a kernel, which is not waited for."""
    return torch.zeros((), dtype=torch.float64, device=ctx.device) + number


def sum_on_device(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else all_reduce(x, axis)
