"""Mean loss over the first batches of a validation set: the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from mt_core.data.loss_weights import WEIGHTS
from mt_core.nn.loss import weighted_sum
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import sum_over
from mt_core.train.step.forward_backward import Batch, ForwardBackward


def evaluate(
    model: nn.Module,
    steps: Iterable[tuple[Sequence[Batch], float]],
    forward_backward: ForwardBackward,
    ctx: ParallelContext | None = None,
) -> float:
    """Sum of weighted losses over the sum of divisors. The training mode of the model is restored.

    steps: for each global batch the micro-batches of this rank, the last may be empty, and this data-parallel rank's
    part of the divisor.
    """
    training = model.training
    ctx = ctx or ParallelContext()
    model.eval()
    try:
        total, divisor = 0.0, 0.0
        for batches, part in steps:
            divisor += part
            if batches:
                total += float(
                    forward_backward.forward(batches, lambda losses, batch: weighted_sum(losses, batch[WEIGHTS]))
                )
        # Context-parallel ranks have parts of the positions, and each the divisor of whole sequences.
        (whole,) = sum_over([total], ctx.dp_cp, ctx.device)
        (whole,) = sum_over([whole], ctx.pp, ctx.device)
        (counted,) = sum_over([divisor], ctx.dp, ctx.device)
        return whole / (counted or 1.0)
    finally:
        model.train(training)
