"""Options that programs give `Accelerator` as objects: loaders, accumulation, autocast, DDP, profiles, folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

import torch

from mt_core.errors import ConfigError

H = TypeVar("H", bound="KwargsHandler")


class DDPCommunicationHookType(StrEnum):
    """Accelerate's names of hooks on the reduction of gradients."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class KwargsHandler:
    """Base of the objects of `Accelerator(kwargs_handlers=[...])`."""

    def to_dict(self) -> dict[str, Any]:
        return {option.name: deepcopy(getattr(self, option.name)) for option in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = type(self)()
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of torch.autocast."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's DistributedDataParallel. comm_hook: compresses gradients, to 16 bits or by PowerSGD.
    comm_wrapper: fp16 or bf16 for what the hook sends. comm_state_option: arguments of torch's PowerSGDState."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for another wrapper, which torch does not have."""
        kinds = (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
        if self.comm_wrapper not in kinds:
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_wrapper={str(self.comm_wrapper)!r}): it can be no, fp16 or bf16"
            )


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of torch.amp.GradScaler, with mixed_precision='fp16'."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """timeout: of each collective and of the start. backend: gloo on the CPU, nccl on GPUs, whichever is given.

    Raises ConfigError for init_method: the launcher's variables say where the ranks meet.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method is not None:
            raise ConfigError(
                f"InitProcessGroupKwargs(init_method={self.init_method!r}): ranks meet at MASTER_ADDR:MASTER_PORT; "
                "leave it out"
            )


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of torch.profiler.profile. activities: names such as cpu and cuda. output_trace_dir: of a Chrome trace
    for each rank."""

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        excluded = ("activities", "schedule_option", "output_trace_dir")
        options = {name: value for name, value in self.to_kwargs().items() if name not in excluded}
        if self.activities is not None:
            options["activities"] = [
                getattr(torch.profiler.ProfilerActivity, activity.upper()) for activity in self.activities
            ]
        if self.schedule_option is not None:
            options["schedule"] = torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(**options)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """num_steps: batches of an optimizer step. adjust_scheduler: the scheduler moves with the optimizer's steps.
    sync_with_dataloader: the last batch of a loader ends a step. sync_each_batch: gradients are summed over ranks
    after each batch."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """split_batches: a batch of the program's loader is cut over ranks; else each rank reads whole ones.
    dispatch_batches: the first rank reads for all; here each rank reads its own, which gives the same samples.
    even_batches: the last batches are filled up from the beginning, so that ranks have as many.
    use_seedable_sampler, data_seed: shuffling follows the seed and the epoch.
    use_stateful_dataloader: raises ConfigError; `skip_first_batches` resumes within an epoch."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            raise ConfigError(
                "DataLoaderConfiguration(use_stateful_dataloader=True): loaders have no state to save; "
                "accelerator.skip_first_batches(loader, batches) resumes within an epoch"
            )


@dataclass(frozen=True)
class Handlers:
    """The objects of `kwargs_handlers`, sorted by kind."""

    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    processes: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def of(cls, handlers: Iterable[Any]) -> Handlers:
        """Raises ConfigError for an object of another kind, and for two of one kind."""
        kinds = {
            AutocastKwargs: "autocast",
            DistributedDataParallelKwargs: "ddp",
            GradScalerKwargs: "scaler",
            InitProcessGroupKwargs: "processes",
            ProfileKwargs: "profile",
        }
        by_name: dict[str, Any] = {}
        for handler in handlers:
            name = kinds.get(type(handler))
            if name is None or name in by_name:
                raise ConfigError(
                    f"kwargs_handlers has {type(handler).__name__}{' twice' if name else ''}; it can have one each of "
                    f"{', '.join(kind.__name__ for kind in kinds)}"
                )
            by_name[name] = handler
        return cls(**by_name)


def require_plugin_options(config: DataLoaderConfiguration, handlers: Handlers, *, step: bool) -> None:
    """Raises ConfigError for what the Megatron-LM plugin has no place for: its engine reads, scales and reduces by
    itself. step: `step_scheduler_with_optimizer`."""
    asked = {
        "split_batches=True": config.split_batches,
        "even_batches=False": not config.even_batches,
        "use_seedable_sampler=True": config.use_seedable_sampler,
        "step_scheduler_with_optimizer=False": not step,
        "AutocastKwargs": handlers.autocast.to_kwargs(),
        "DistributedDataParallelKwargs": handlers.ddp.to_kwargs(),
        "GradScalerKwargs": handlers.scaler.to_kwargs(),
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    if names:
        raise ConfigError(
            f"Accelerator with the Megatron-LM plugin does not follow {', '.join(names)}: its engine divides batches "
            "over the data-parallel ranks, steps the schedule with the optimizer, and has its own loss scale and "
            "buckets (docs/guides/from-accelerate.md); leave it out"
        )


# -- folders of a run: `ProjectConfiguration` --------------------------------------------------------


@dataclass(frozen=True)
class ProjectConfiguration:
    """project_dir: of the run. logging_dir: of trackers that write files; default, project_dir.

    automatic_checkpoint_naming: `save_state()` writes checkpoints/checkpoint_N below project_dir. total_limit:
    of these; the oldest are removed. iteration: the next number. Raises ConfigError for save_on_each_node,
    and for a total_limit of states that the program names itself.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.save_on_each_node:
            raise ConfigError("ProjectConfiguration(save_on_each_node=True): states are written once; leave it out")
        if self.total_limit is not None and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"ProjectConfiguration(total_limit={self.total_limit}) counts with automatic_checkpoint_naming=True"
            )
        if self.logging_dir is None:
            object.__setattr__(self, "logging_dir", self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the folders of a configuration that was made before they were known."""
        object.__setattr__(self, "project_dir", project_dir)
        if self.logging_dir is None:
            object.__setattr__(self, "logging_dir", project_dir)

    @classmethod
    def of(
        cls, project_config: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
    ) -> ProjectConfiguration:
        """From the arguments of `Accelerator`; project_dir fills in what project_config does not say."""
        if project_config is None:
            return cls(None if project_dir is None else str(project_dir))
        folder = project_config.project_dir or project_dir
        return replace(project_config, project_dir=None if folder is None else str(folder))
