"""Locates the first module with non-finite values, after a step has failed."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from mt_core.nn.auxiliary import ReportsNonFinite
from mt_core.parallel.context import ParallelContext


def first_fault(model: nn.Module, ctx: ParallelContext) -> str | None:
    """The first fault in the order of stages and modules; None if no module recorded one. Synchronizes with the
    device. Collective over the world."""
    noted = (module.fault() for module in model.modules() if isinstance(module, ReportsNonFinite))
    # Modules come in the order of the forward pass, and the first fault is the origin of the later ones.
    own = next((fault for fault in noted if fault is not None), None)
    if ctx.world.size == 1:
        return own
    everyone: list[str | None] = [None] * ctx.world.size
    dist.all_gather_object(everyone, own, group=ctx.world.group)
    # Ranks are numbered with the pipeline stage slowest, so the first one with a fault is of the earliest stage.
    return next((fault for fault in everyone if fault is not None), None)
