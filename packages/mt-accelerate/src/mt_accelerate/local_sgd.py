"""`LocalSGD`: ranks train alone for some steps, and then take the mean of their weights."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn

from mt_accelerate.operations import world_ranks
from mt_core.errors import ConfigError
from mt_core.parallel.reductions import mean_


class LocalSGD:
    """with LocalSGD(accelerator, model, local_sgd_steps): call `step` after each step of the optimizer. Raises
    ConfigError with Megatron-LM."""

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if accelerator.state.megatron_lm_plugin is not None:
            raise ConfigError("LocalSGD is for programs without the plugin; leave it out")
        self.enabled = enabled and accelerator.use_distributed
        self.accelerator, self.model, self.steps = accelerator, model, local_sgd_steps
        self._taken = 0
        self._no_sync: Any = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._average()
            self._no_sync.__exit__(kind, error, trace)

    def step(self) -> None:
        self._taken += 1
        if self.enabled and self._taken % self.steps == 0:
            self._average()

    def _average(self) -> None:
        for parameter in self.model.parameters():
            mean_(parameter.data, world_ranks())
