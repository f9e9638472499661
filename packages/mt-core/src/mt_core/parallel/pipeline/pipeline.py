"""`Pipeline`: forward and backward passes of a model with stages on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.p2p_communicator import P2PCommunicator
from mt_core.parallel.pipeline.schedule_run import Batch, LossFn, Recorder, ScheduleRun, StageRunner
from mt_core.parallel.pipeline.schedule_tables import Action, ranks_of_stages
from mt_core.parallel.pipeline.schedules import PipelineSchedule, rank_actions
from mt_core.parallel.pipeline.stage import Activations, Pipelined, Stage


class Unrecorded:
    """A recorder that records nothing."""

    def span(self, action: Action) -> AbstractContextManager[object]:
        return nullcontext()


class Pipeline:
    """This rank's part of a pipeline over the axis `pp`. Every rank constructs one and makes the same calls.

    model: holds this rank's stages (`stages_of_rank` says which). stages: all of them, in order. inputs: the fields of
    a micro-batch that the model takes; every stage gets all of them, and `options`. Hidden states may be a tensor or
    a tuple of tensors; their shapes, dtypes and need of a gradient have to follow from the shapes of the micro-batch.
    begin: called with the micro-batch before each stage of it. within: a context that each stage computes in.

    Raises ConfigError when the stages do not fit the schedule.
    """

    def __init__(
        self,
        model: Pipelined,
        stages: Sequence[Stage],
        schedule: PipelineSchedule,
        ctx: ParallelContext,
        *,
        inputs: Sequence[str],
        options: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
        begin: Callable[[Batch], object] = lambda batch: None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        # Only for its ConfigError, before the communicator below is made, which is collective.
        schedule.stages_per_rank(ctx.pp.size, len(stages))
        self.model, self.stages, self.schedule, self.axis = model, tuple(stages), schedule, ctx.pp
        self.inputs, self.options, self.begin = tuple(inputs), dict(options or {}), begin
        self.within = within
        self.rank = StageRunner(
            self._run_stage,
            ranks_of_stages(len(stages), ctx.pp.size, schedule.placement),
            P2PCommunicator(ctx.pp, ctx.device, ctx.axis("pp_backward")),
            recorder or Unrecorded(),
        )

    def forward_backward(self, micro_batches: Sequence[Batch], share: LossFn) -> Tensor:
        """Accumulate the gradients of the sum of shares(output, micro-batch) in the parameters of this rank's stages.

        Any number of micro-batches, which may differ in shape; the same on every rank of the pipeline. Returns the sum
        (a detached scalar in fp32); zero on ranks without the last stage. Nothing is scaled or averaged.
        """
        return self._run(micro_batches, share, training=True)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Batch], share: LossFn) -> Tensor:
        """The same sum, in fp64 and without gradients. The caller sets evaluation mode."""
        return self._run(micro_batches, share, training=False)

    def _run(self, micro_batches: Sequence[Batch], share: LossFn, *, training: bool) -> Tensor:
        a_pass = ScheduleRun(self.rank, micro_batches, share, training=training)
        # No schedule has a table for none.
        if not micro_batches:
            return a_pass.total
        return a_pass.run(
            rank_actions(
                self.schedule,
                self.axis.size,
                len(self.stages),
                len(micro_batches),
                self.axis.rank,
                training=training,
            )
        )

    def _run_stage(self, stage: int, hidden: Activations | None, batch: Batch) -> Any:
        self.begin(batch)
        # A field that this micro-batch does not have keeps the model's default.
        inputs = {name: batch[name] for name in self.inputs if name in batch}
        with self.within():
            return self.model.run_stage(self.stages[stage], hidden, **inputs, **self.options)
