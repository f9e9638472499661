"""Attributes of an Accelerator that programs read: the options that it was made with, and what other engines have."""

from __future__ import annotations

from typing import Any

import torch

from mt_accelerate.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from mt_accelerate.state import AcceleratorState


class ReadAttributes:
    """Base of `Accelerator`, which sets what is annotated here."""

    state: AcceleratorState
    _config: DataLoaderConfiguration
    _handlers: Handlers
    _run: Any

    # -- options ----------------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        return self._config

    @property
    def split_batches(self) -> bool:
        return self._config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self._config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self._config.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        return self._config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self._config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return False

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        return _if_given(self._handlers.autocast)

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        return _if_given(self._handlers.ddp)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        return _if_given(self._handlers.scaler)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        return _if_given(self._handlers.processes)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        return _if_given(self._handlers.profile)

    # -- precision --------------------------------------------------------------------------------

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """With fp16. None with Megatron-LM, whose engine has the loss scale."""
        scaler: torch.amp.GradScaler | None = getattr(self._run, "scaler", None)
        return scaler

    @property
    def native_amp(self) -> bool:
        """Whether `backward` and `autocast` change the precision."""
        return self.state.megatron_lm_plugin is None and self.state.mixed_precision in ("fp16", "bf16")

    @property
    def fp8_enabled(self) -> bool:
        return self.state.mixed_precision == "fp8"

    # -- what the engines that are refused would have: programs ask for them to find out ----------

    deepspeed_plugin: None = None
    is_fsdp2: bool = False
    fp8_backend: None = None
    parallelism_config: None = None
    is_composable_parallelism_enabled: bool = False
    should_save_model: bool = True
    rng_types: None = None
    has_lomo_optimizer: bool = False
    has_fp8_handler: bool = False
    delayed_fp8_autocast: bool = False
    fp8_recipe_handler: None = None
    ao_recipe_handler: None = None
    te_recipe_handler: None = None
    msamp_recipe_handler: None = None


def _if_given(handler: Any) -> Any:
    """None for the default, as Accelerate has it for a kind that the program has not given."""
    assert isinstance(handler, KwargsHandler)
    return handler if handler.to_kwargs() else None
