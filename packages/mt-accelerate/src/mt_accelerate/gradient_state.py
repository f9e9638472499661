"""`GradientState`: whether the next step of the optimizer is due, and which loader the program is reading."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from mt_core.errors import ConfigError


class GradientState:
    """What programs read of `accelerator.gradient_state`.

    sync_gradients: the gradients of this batch are summed over ranks, and the optimizer's step counts. num_steps:
    batches that one step accumulates. `GradientState()` gives that of the Accelerator that was made last.
    """

    num_steps: int
    sync_gradients: bool
    adjust_scheduler: bool
    sync_with_dataloader: bool
    sync_each_batch: bool
    in_accumulation: bool = False
    dataloader_references: list[Any]

    def __new__(cls) -> GradientState:
        found = _CURRENT.get()
        if found is None:
            raise ConfigError("GradientState() belongs to an Accelerator; make one first")
        return found

    @classmethod
    def begin(
        cls, num_steps: int, *, adjust_scheduler: bool, sync_with_dataloader: bool, sync_each_batch: bool
    ) -> GradientState:
        """That of a new Accelerator."""
        made = object.__new__(cls)
        made.num_steps, made.sync_gradients = num_steps, True
        made.adjust_scheduler, made.sync_with_dataloader = adjust_scheduler, sync_with_dataloader
        made.sync_each_batch, made.dataloader_references = sync_each_batch, []
        _CURRENT.set(made)
        return made

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader whose loop runs; None outside of loops."""
        return self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def in_dataloader(self) -> bool:
        return bool(self.dataloader_references)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch is the last of its loader."""
        return self.in_dataloader and bool(self.active_dataloader.at_end)

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no repetitions; 0 if it is full, -1 outside of loops."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    @classmethod
    def _reset_state(cls) -> None:
        """Accelerate's tests call it. Each Accelerator has a state of its own."""


# Programs call GradientState() without naming an Accelerator, as Accelerate's shared state allows.
_CURRENT: ContextVar[GradientState | None] = ContextVar("mt_accelerate.gradient_state", default=None)
