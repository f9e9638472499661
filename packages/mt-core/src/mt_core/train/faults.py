"""Where numbers were not finite first, after a step has failed."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from mt_core.nn.auxiliary import NotesFaults
from mt_core.parallel.context import ParallelContext


def first_fault(model: nn.Module, ctx: ParallelContext) -> str | None:
    """In the order of pipeline stages and of modules; None if no module noted one. Waits for the device; collective
    over the world."""
    noted = (module.fault() for module in model.modules() if isinstance(module, NotesFaults))
    own = next((fault for fault in noted if fault is not None), None)
    if ctx.world.size == 1:
        return own
    everyone: list[str | None] = [None] * ctx.world.size
    dist.all_gather_object(everyone, own, group=ctx.world.group)
    return next((fault for fault in everyone if fault is not None), None)
