"""The batches of the data set with what the teacher says of them (train.batch_source="teacher")."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from mt_core.data.loader import Arrays, RankBatch
from mt_core.errors import ConfigError
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train.batch_source import BatchSource, TrainingRun
from mt_core.train.step.batches import FIRST_SAMPLE
from mt_tune.distill.cache import TeacherCache, fields_of, row_keys
from mt_tune.distill.cache_writing import open_or_write
from mt_tune.distill.config import DistillationConfig
from mt_tune.distill.hidden import HiddenLoss
from mt_tune.distill.objective import DistillationLoss, target_of_output
from mt_tune.distill.projections import FOLDER, HiddenProjections
from mt_tune.distill.rows import Answer, RowTeacher, build_row_teacher, samples_of
from mt_tune.distill.targets import IDS, LOG_PROBS, LOGITS, Target
from mt_tune.distill.teacher import Teacher, build_teacher

if TYPE_CHECKING:
    from mt_tune.distill.on_policy import StudentBatches


class Teaching(Protocol):
    """Adds to a batch what the loss needs of the teacher."""

    def complete(self, batch: RankBatch) -> RankBatch: ...


class TeacherSource(BatchSource):
    """The teacher is one of three: a model in the student's layout (`SameLayout`), a model in a layout of its own
    (`OwnLayout`), or its answers on a disk (`Cached`)."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        keys = run.config.section(DistillationConfig)
        self.teaching: Teaching
        if keys.cache is not None:
            self.teaching = Cached(run, keys)
        elif keys.teacher_parallel:
            self.teaching = OwnLayout(run, keys)
        else:
            self.teaching = SameLayout(run, keys)
        self.student: StudentBatches | None = None
        if keys.on_policy:
            # The engine of mt-infer writes.
            from mt_tune.distill.on_policy import StudentBatches

            self.student = StudentBatches(run, keys)

    def batches(self) -> Generator[RankBatch, None, None]:
        if self.student is None:
            yield from super().batches()
            return
        for batch in self.student.batches():
            yield self.teaching.complete(batch)

    def complete(self, batch: RankBatch) -> RankBatch:
        return self.teaching.complete(batch if self.student is None else self.student.completed(batch))

    def state_dict(self) -> Mapping[str, Any]:
        """Also writes the file of the projections, before the checkpoint is written."""
        projections = self._projections
        if projections is not None:
            projections.update()
            projections.save()
        of_student = {} if self.student is None else self.student.state_dict()
        return {**of_student, **({} if projections is None else {FOLDER: self.run.state.iteration})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.student is not None:
            self.student.load_state_dict(state)
        if self._projections is not None:
            self._projections.load()

    @property
    def _projections(self) -> HiddenProjections | None:
        return self.teaching.projections if isinstance(self.teaching, SameLayout) else None


class SameLayout:
    """The teacher runs inside of the loss, a micro-batch at a time, so that its logits are where the student's are.
    Under pipeline parallelism its stages run for all micro-batches of a step before those of the student."""

    def __init__(self, run: TrainingRun, keys: DistillationConfig) -> None:
        self.run = run
        self.teacher = build_teacher(run, keys, project=keys.chunk_positions is None)
        self.ahead = run.ctx.pp.size > 1
        self._targets: dict[int, Target] = {}
        loss = run.engine.loss
        assert isinstance(loss, DistillationLoss)
        loss.teach = self._computed_ahead if self.ahead else self._computed
        self.projections = build_projections(run, keys, self.teacher) if keys.hidden_projection else None
        if keys.hidden_layers:
            loss.compare_hidden = HiddenLoss(keys, run.model, self.teacher.model, run.ctx, self.projections)

    def complete(self, batch: RankBatch) -> RankBatch:
        if self.projections is not None:  # of the step before this batch, which may be one of an evaluation
            self.projections.update()
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

    def _computed(self, batch: Mapping[str, Tensor]) -> Target:
        (output,) = self.teacher.outputs([batch])
        return target_of_output(output)


def build_projections(run: TrainingRun, keys: DistillationConfig, teacher: Teacher) -> HiddenProjections:
    """For models whose configurations say their hidden sizes. Raises ConfigError for others."""
    student, taught = (getattr(config.model, "hidden_size", None) for config in (run.config, teacher.config))
    if student is None or taught is None:
        raise ConfigError("distillation.hidden_projection=true: model.hidden_size of student and teacher is not known")
    return HiddenProjections(run, len(keys.hidden_layers), student, taught, keys.hidden_projection_lr)


class OwnLayout:
    """The teacher has ranks and axes of its own in the same processes. Its answers travel as arrays of whole samples:
    few numbers with distillation.top_k, all logits without."""

    def __init__(self, run: TrainingRun, keys: DistillationConfig) -> None:
        self.run = run
        self.teacher: RowTeacher = build_row_teacher(run, keys)

    def complete(self, batch: RankBatch) -> RankBatch:
        ctx = self.run.ctx
        local_samples = samples_of(batch) if ctx.tp.rank == ctx.cp.rank == ctx.pp.rank == 0 else {}
        computed = all_gather_objects(self.teacher.answers(local_samples, ctx), ctx.world)
        answers = {key: answer for of_rank in computed for key, answer in of_rank.items()}
        return with_answers(batch, answers)


class Cached:
    """The answers come from files, which are written first where distillation.teacher says whose they are."""

    def __init__(self, run: TrainingRun, keys: DistillationConfig) -> None:
        assert keys.top_k is not None
        self.top_k = keys.top_k
        self.cache: TeacherCache = open_or_write(run, keys)

    def complete(self, batch: RankBatch) -> RankBatch:
        completed = []
        for arrays in batch.micro_batches:
            ids, log_probs = fields_of(row_keys(arrays), self.cache, self.top_k)
            completed.append({**arrays, IDS: ids, LOG_PROBS: log_probs})
        return replace(batch, micro_batches=completed)


def with_answers(batch: RankBatch, answers: Mapping[str, Answer]) -> RankBatch:
    """The batch with the fields that the answers of its samples are."""

    def completed(arrays: Arrays) -> Arrays:
        columns = [np.stack(column) for column in zip(*(answers[key] for key in row_keys(arrays)), strict=True)]
        names = (LOGITS,) if len(columns) == 1 else (IDS, LOG_PROBS)
        return {**arrays, **dict(zip(names, columns, strict=True))}

    return replace(batch, micro_batches=[completed(arrays) for arrays in batch.micro_batches])
