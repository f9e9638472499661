"""Auxiliary losses of layers (such as MoE load balancing), averaged over the micro-batches and ranks of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.train.host_transfer import device_scalar, sum_on_device


class AuxiliaryMeans:
    """Auxiliary losses of all pipeline stages, each the mean over the micro-batches of all data-parallel ranks.

    Construction is collective over the pipeline stages, which exchange the names of their losses.
    """

    def __init__(self, own: Sequence[AuxiliaryLoss], ctx: ParallelContext) -> None:
        self.own, self.ctx = {loss.name: loss for loss in own}, ctx
        self.names = _names_on_all_stages(list(self.own), ctx.pp)

    def begin(self, passes: int, scale: float = 1.0) -> None:
        """passes: micro-batches of the step. scale: the loss scale, applied to the auxiliary gradients too."""
        for auxiliary in self.own.values():
            # Gradients are summed over passes and data-parallel ranks; with this factor their sum is that of the mean.
            auxiliary.scale = scale / (passes * self.ctx.dp.size)

    def take(self, passes: int) -> list[Tensor]:
        """For each of `names` its mean, [] fp64 on the device, unscaled. Does not synchronize with the device."""
        if not self.names:
            return []
        # Every stage gives a number for each name, 0 for those of other stages, so that one all-reduce over the stages
        # merges them.
        totals = {name: loss.take_on_device() for name, loss in self.own.items()}
        own = [totals.get(name) for name in self.names]
        means = torch.stack([device_scalar(0.0 if total is None else total, self.ctx) for total in own]) / passes
        # dp and not dp_cp: all ranks that share a micro-batch have the same value (see AuxiliaryLoss).
        return list(sum_on_device(sum_on_device(means / self.ctx.dp.size, self.ctx.dp), self.ctx.pp))


def _names_on_all_stages(own: list[str], pp: Axis) -> list[str]:
    """The names in the order of the stages. Names are unique over the stages."""
    if pp.size == 1:
        return own
    everyone: list[list[str] | None] = [None] * pp.size
    dist.all_gather_object(everyone, own, group=pp.group)
    return [name for of_stage in everyone for name in of_stage or []]
