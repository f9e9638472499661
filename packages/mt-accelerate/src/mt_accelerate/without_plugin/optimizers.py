"""A program's optimizer, which steps once the gradients of all accumulated batches are there, and its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mt_accelerate.state import GradientState


class PreparedOptimizer(Optimizer):
    """Stands for `optimizer`, whose attributes it has. scaler: with fp16."""

    def __init__(self, optimizer: Optimizer, state: GradientState, scaler: torch.amp.GradScaler | None) -> None:
        # No call of Optimizer's: groups and state are those of the program's optimizer.
        self.optimizer, self.gradient_state, self.scaler = optimizer, state, scaler
        self.step_was_skipped = False
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Calls the optimizer's own where it has one, such as schedule-free ones."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        if not self.gradient_state.sync_gradients:
            return None
        self.num_steps += 1
        if self.scaler is None:
            self.step_was_skipped = False
            return self.optimizer.step(closure)
        before = self.scaler.get_scale()
        result = self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        # The scaler halves its scale after a gradient that was not finite, whose step it left out.
        self.step_was_skipped = self.scaler.get_scale() < before
        return result


# -- scheduler ---------------------------------------------------------------------------------------


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
