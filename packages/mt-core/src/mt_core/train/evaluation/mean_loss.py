"""Mean loss over the first batches of a validation set: the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import sum_over
from mt_core.train.step.forward_backward import Batch, ForwardBackward, masked_sum


def evaluate(
    model: nn.Module,
    steps: Iterable[Sequence[Batch]],
    forward_backward: ForwardBackward,
    ctx: ParallelContext | None = None,
) -> float:
    """Sum of token losses divided by the number of unmasked tokens. The training mode of the model is restored.

    steps: for each global batch the micro-batches of this rank; the last may be empty.
    """
    training = model.training
    ctx = ctx or ParallelContext()
    model.eval()
    try:
        total, tokens = 0.0, 0.0
        for batches in steps:
            if batches:
                total += float(
                    forward_backward.forward(batches, lambda losses, batch: masked_sum(losses, batch["loss_mask"]))
                )
                tokens += float(sum(batch["loss_mask"].sum() for batch in batches))
        whole, counted = sum_over([total, tokens], ctx.dp_cp, ctx.device)
        (whole,) = sum_over([whole], ctx.pp, ctx.device)
        return whole / max(counted, 1.0)
    finally:
        model.train(training)
