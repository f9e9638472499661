"""The batches of the data set with what the teacher says of them (train.batch_source="teacher")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mt_core.data.loader import RankBatch
from mt_core.train.batch_source import BatchSource, TrainingRun
from mt_core.train.step.batches import FIRST_SAMPLE
from mt_tune.distill.config import DistillationConfig
from mt_tune.distill.objective import DistillationLoss, target_of_output
from mt_tune.distill.targets import Target
from mt_tune.distill.teacher import build_teacher


class TeacherSource(BatchSource):
    """A teacher in the student's layout is run inside of the loss, a micro-batch at a time. Under pipeline parallelism
    the stages of the teacher run for all micro-batches of a step before the student's do."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.keys = run.config.section(DistillationConfig)
        loss = run.engine.loss
        assert isinstance(loss, DistillationLoss)
        self.teacher = build_teacher(run, self.keys, project=self.keys.chunk_positions is None)
        self.ahead = run.ctx.pp.size > 1
        self._targets: dict[int, Target] = {}
        loss.teach = self._computed_ahead if self.ahead else self._computed

    def complete(self, batch: RankBatch) -> RankBatch:
        if self.ahead:
            batches = self.run.engine.device_batches.take(batch)
            outputs = self.teacher.outputs(batches)
            # Empty before the last stage, which alone computes the loss.
            self._targets = {
                int(of_batch[FIRST_SAMPLE]): target_of_output(output)
                for of_batch, output in zip(batches, outputs, strict=False)
            }
        return batch

    def _computed_ahead(self, batch: Mapping[str, Tensor]) -> Target:
        return self._targets.pop(int(batch[FIRST_SAMPLE]))

    @torch.no_grad()
    def _computed(self, batch: Mapping[str, Tensor]) -> Target:
        (output,) = self.teacher.outputs([batch])
        return target_of_output(output)


