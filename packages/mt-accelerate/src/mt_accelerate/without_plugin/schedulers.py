"""A program's scheduler: it moves with the optimizer's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_accelerate.gradient_state import GradientState
from mt_accelerate.without_plugin.optimizers import PreparedOptimizer


class PreparedScheduler:
    """Stands for `scheduler`, whose attributes it has.

    moves: of the scheduler for a step, the number of ranks unless batches are split: programs count batches of one
    process's loader. with_optimizer: False moves it at each call.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        state: GradientState,
        moves: int,
        *,
        with_optimizer: bool,
    ) -> None:
        self.scheduler, self.optimizers, self.gradient_state = scheduler, optimizers, state
        self.moves, self.with_optimizer = moves, with_optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **options: Any) -> None:
        if not self.with_optimizer:
            self.scheduler.step(*arguments, **options)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                # torch warns about a scheduler whose count is below the optimizer's calls.
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.moves):
            # Past the end some schedulers of torch raise an error.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*arguments, **options)

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.scheduler.load_state_dict(state_dict)
