"""`Pipeline`: forward and backward passes of a model whose stages are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mt_core.nn.stage import Pipelined, Stage
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.exchange import Exchange
from mt_core.parallel.pipeline.hidden import Hidden
from mt_core.parallel.pipeline.orders import Action
from mt_core.parallel.pipeline.passes import Batch, Pass, Rank, Recorder, Share
from mt_core.parallel.pipeline.placement import ranks_of_stages
from mt_core.parallel.pipeline.schedules import get_schedule, rank_actions


class Unrecorded:
    """Takes no notes."""

    def span(self, action: Action) -> AbstractContextManager[object]:
        return nullcontext()


class Pipeline:
    """This rank's part of a pipeline over the axis `pp`; every rank of it makes one, and then the same calls.

    model: holds this rank's stages (`stages_of_rank` says which). stages: all of them, in order. inputs: the fields of
    a micro-batch that the model takes; every stage gets all of them, and `options`. Hidden states may be a tensor or
    a tuple of tensors; their shapes, dtypes and need of a gradient have to follow from the shapes of the micro-batch.
    begin: called with the micro-batch before each stage of it.

    Raises ConfigError when the stages do not fit the schedule.
    """

    def __init__(
        self,
        model: Pipelined,
        stages: Sequence[Stage],
        schedule: str,
        ctx: ParallelContext,
        *,
        inputs: Sequence[str],
        options: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
        begin: Callable[[Batch], object] = lambda batch: None,
    ) -> None:
        chosen = get_schedule(schedule)
        chosen.stages_per_rank(ctx.pp.size, len(stages))
        self.model, self.stages, self.schedule, self.axis = model, tuple(stages), chosen.name, ctx.pp
        self.inputs, self.options, self.begin = tuple(inputs), dict(options or {}), begin
        self.rank = Rank(
            self._run_stage,
            ranks_of_stages(len(stages), ctx.pp.size, chosen.placement),
            Exchange(ctx.pp, ctx.device),
            recorder or Unrecorded(),
        )

    def forward_backward(self, micro_batches: Sequence[Batch], share: Share) -> Tensor:
        """Accumulate the gradients of the sum of shares(output, micro-batch) in the parameters of this rank's stages.

        Any number of micro-batches, which may differ in shape; the same on every rank of the pipeline. Returns the sum
        (a detached scalar in fp32); zero on ranks without the last stage. Nothing is scaled or averaged.
        """
        return self._run(micro_batches, share, training=True)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Batch], share: Share) -> Tensor:
        """The same sum, in fp64 and without gradients. Evaluation mode is the caller's to set."""
        return self._run(micro_batches, share, training=False)

    def _run(self, micro_batches: Sequence[Batch], share: Share, *, training: bool) -> Tensor:
        a_pass = Pass(self.rank, micro_batches, share, training=training)
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

    def _run_stage(self, stage: int, hidden: Hidden | None, batch: Batch) -> Any:
        self.begin(batch)
        inputs = {name: batch[name] for name in self.inputs if name in batch}
        return self.model.run_stage(self.stages[stage], hidden, **inputs, **self.options)
