"""Mean loss over the first batches of a validation set: the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import sum_over
from mt_core.train.step import Batch, ForwardStep, masked_sum


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], forward_step: ForwardStep, ctx: ParallelContext | None = None
) -> float:
    """Sum of token losses over the count of unmasked tokens; the model is left in the mode it was in."""
    training = model.training
    model.eval()
    try:
        total, tokens = torch.zeros((), dtype=torch.float64), 0.0
        for batch in batches:
            losses: Tensor = forward_step(model, batch)
            total += masked_sum(losses, batch["loss_mask"]).double().cpu()
            tokens += float(batch["loss_mask"].sum())
        ctx = ctx or ParallelContext()
        whole, counted = sum_over([float(total), tokens], ctx.dp_cp, ctx.device)
        return whole / max(counted, 1.0)
    finally:
        model.train(training)
