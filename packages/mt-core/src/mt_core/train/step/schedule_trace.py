"""The timeline of one step under pipeline parallelism, in the file that logging.trace_schedule names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.trace import ScheduleRecorder, write_trace
from mt_core.train.step.optimizer_step import PendingOutcome

TRACED_STEP = 2
"""Counted from the first step of this process, which includes warm-up."""


class ScheduleTrace:
    """Runs the steps, and writes the timeline that `recorder` has of the one to trace."""

    def __init__(self, path: Path, ctx: ParallelContext) -> None:
        self.path, self.ctx = path, ctx
        self.recorder = ScheduleRecorder(ctx.device)
        self._steps_taken = 0

    def run(self, step: Callable[[], PendingOutcome], iteration: int) -> tuple[PendingOutcome, str | None]:
        """What `step` returns, and a note for the user if its timeline is written. Collective."""
        self._steps_taken += 1
        if self._steps_taken != TRACED_STEP:
            return step(), None
        # trace_schedule excludes deferred metrics (needs_numbers_at_once), so the step has ended when step() returns.
        self.recorder.begin(self.ctx.pp)
        pending = step()
        timeline = self.recorder.gather(self.ctx.pp)
        if self.ctx.is_writer:
            write_trace(timeline, self.path)
        return pending, f"schedule of step {iteration} written to {self.path}"
