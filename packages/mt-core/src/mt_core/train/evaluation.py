"""Mean loss over the first batches of a validation set: the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import sum_over
from mt_core.train.step import Batch, MicroBatches, masked_sum


def evaluate(
    model: nn.Module,
    steps: Iterable[Sequence[Batch]],
    micro_batches: MicroBatches,
    ctx: ParallelContext | None = None,
) -> float:
    """Sum of token losses over the count of unmasked tokens; the model is left in the mode it was in.

    steps: the micro-batches of this rank, a global batch at a time; a rank may have none of the last one.
    """
    training = model.training
    ctx = ctx or ParallelContext()
    model.eval()
    try:
        total, tokens = 0.0, 0.0
        for batches in steps:
            if batches:
                total += float(
                    micro_batches.forward(batches, lambda losses, batch: masked_sum(losses, batch["loss_mask"]))
                )
                tokens += float(sum(batch["loss_mask"].sum() for batch in batches))
        whole, counted = sum_over([total, tokens], ctx.dp_cp, ctx.device)
        (whole,) = sum_over([whole], ctx.pp, ctx.device)
        return whole / max(counted, 1.0)
    finally:
        model.train(training)
