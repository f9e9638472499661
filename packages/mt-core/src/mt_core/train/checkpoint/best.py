"""The checkpoint of the best evaluation (checkpoint.best_metric), which `best.json` beside `latest` names."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mt_core.checkpoint_lookup import BestRecord, read_best
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import any_over
from mt_core.train.checkpoint.run_directory import RunDirectory


class BestCheckpoint:
    """Compares evaluations. Only the writer's record decides, so that all ranks save together."""

    def __init__(self, metric: str, directory: RunDirectory, ctx: ParallelContext, iteration: int) -> None:
        """iteration: at which the run begins; a record of a later one belongs to an abandoned run."""
        self.metric, self._directory, self._ctx = metric, directory, ctx
        found = read_best(directory.checkpoints)
        # Values of another metric do not compare.
        fits = found is not None and found.metric == metric and found.iteration <= iteration
        self.record = found if fits else None

    def improves(self, values: Mapping[str, float]) -> bool:
        """Whether the evaluation is better than all before it; one that is NaN never is. Collective over the world."""
        value = values[self.metric]
        before = math.nan if self.record is None else self.record.value
        # Losses are minimized, all other metrics maximized.
        better = value < before if self.metric.endswith("_loss") else value > before
        # A record of NaN, as there is before the first evaluation, compares with nothing: any number is better.
        better = better or (math.isnan(before) and not math.isnan(value))
        # Only the writer has read the file for certain; its answer is the one that all ranks get.
        return any_over(better and self._ctx.is_writer, self._ctx.world, self._ctx.device)

    def update(self, iteration: int, value: float) -> None:
        """Name the checkpoint of `iteration`, which is completely written."""
        name = self._directory.checkpoint(iteration).name
        self.record = BestRecord(checkpoint=name, iteration=iteration, metric=self.metric, value=value)
        if self._ctx.is_writer:
            self._directory.set_best(self.record)
