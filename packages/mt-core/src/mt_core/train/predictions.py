"""Outputs of a model for every sample of a data set, on every rank, and the mean loss over a validation set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_core.data.loss_weights import WEIGHTS
from mt_core.nn.loss import Loss, weighted_sum
from mt_core.nn.model import contract
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.reductions import all_reduce_, sum_over
from mt_core.train.step.forward_backward import Batch, ForwardBackward

OUTPUTS, LOSSES = "outputs", "losses"


@dataclass(frozen=True)
class Predictions:
    """Outputs and losses of N samples, in the order of the data set, on the CPU.

    outputs: [N, ...] of the model. losses: [N]. fields: those of the samples that have one value each, [N], such as
    labels, loss_mask (0 where there is no label) and uid.
    """

    outputs: Tensor
    losses: Tensor
    fields: Mapping[str, Tensor]

    def labelled(self) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, losses, labels) of the samples that have a label."""
        kept = self.fields["loss_mask"] > 0
        return self.outputs[kept], self.losses[kept], self.fields["labels"][kept]


@torch.no_grad()
def predict(
    model: nn.Module,
    steps: Iterable[tuple[Sequence[range], Sequence[Batch]]],
    loss: Loss,
    count: int,
    ctx: ParallelContext,
) -> Predictions:
    """The training mode of the model is restored. Collective over the data-parallel axis.

    steps: for each global batch, the samples and fields of this rank's micro-batches. An empty range is computed, as
    ranks meet in collectives, and left out. loss: (output, batch) -> losses [batch]. count: samples of the data set.
    """
    training, inputs = model.training, contract(model).inputs
    table = _Table(count)
    model.eval()
    try:
        for groups, batches in steps:
            for samples, batch in zip(groups, batches, strict=True):
                output = model(**{name: batch[name] for name in inputs if name in batch})
                # [rows]: one value a sample.
                fields = {name: field for name, field in batch.items() if field.ndim == 1}
                table.put(samples, {OUTPUTS: output.float(), LOSSES: loss(output, batch).float(), **fields})
    finally:
        model.train(training)
    columns = table.summed(ctx)
    return Predictions(columns.pop(OUTPUTS), columns.pop(LOSSES), columns)


class _Table:
    """Columns of `count` rows. Each row is written by one data-parallel rank and is 0 on the others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._written = torch.zeros(count, dtype=torch.int64)
        self._columns: dict[str, Tensor] = {}

    def put(self, samples: range, rows: Mapping[str, Tensor]) -> None:
        self._written[samples.start : samples.stop] += 1
        for name, values in rows.items():
            if name not in self._columns:
                self._columns[name] = torch.zeros((self._count, *values.shape[1:]), dtype=values.dtype)
            # A micro-batch that does not count has one row and an empty range: nothing of it is stored.
            self._columns[name][samples.start : samples.stop] = values[: len(samples)].cpu()

    def summed(self, ctx: ParallelContext) -> dict[str, Tensor]:
        columns = {name: _sum_over(column, ctx) for name, column in self._columns.items()}
        # Rows that two ranks wrote would be the sum of both.
        assert (_sum_over(self._written, ctx) == 1).all(), "each sample is predicted once"
        return columns


def _sum_over(column: Tensor, ctx: ParallelContext) -> Tensor:
    if ctx.dp.size == 1:
        return column
    summed = column.to(ctx.device)
    all_reduce_(summed, ctx.dp)
    return summed.cpu()


# -- mean loss over the first batches of a validation set, the same ones every time ------------------


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
