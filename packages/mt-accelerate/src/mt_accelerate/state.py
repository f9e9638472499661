"""`AcceleratorState`, `PartialState` and `GradientState`: processes of a run, shared objects, accumulation."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_core.errors import ConfigError
from mt_core.launch.environment import read_environment
from mt_core.launch.phases import PhaseTimeouts
from mt_core.launch.process_group import initialize
from mt_core.parallel.context import wait_for_all
from mt_core.train.build import resolve_device

# -- `Processes`: what a program asks of its ranks, and lets single ones do --------------------------

F = TypeVar("F", bound=Callable[..., Any])


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Processes(ABC):
    """The ranks of a run. The main process is the first rank, with Megatron-LM the last one."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    @abstractmethod
    def main_process_index(self) -> int: ...

    @property
    def num_processes(self) -> int:
        return world_size()

    @property
    def process_index(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        return read_environment().local_rank

    @property
    def is_main_process(self) -> bool:
        return self.process_index == self.main_process_index

    @property
    def is_last_process(self) -> bool:
        return self.process_index == world_size() - 1

    @property
    def is_local_main_process(self) -> bool:
        """The first rank of this node, or the last one if the main process is the last rank."""
        environment = read_environment()
        if environment.world_size == 1:
            return self.is_main_process
        last = self.main_process_index == world_size() - 1
        return environment.local_rank == (environment.local_world_size - 1 if last else 0)

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return world_size() > 1

    @property
    def default_device(self) -> torch.device:
        return self.device

    def wait_for_everyone(self) -> None:
        wait_for_all()

    def main_process_first(self) -> Any:
        """The block runs on the main process before it runs on the others."""
        return _first(self.is_main_process)

    def local_main_process_first(self) -> Any:
        """The same on each node. Collective over all nodes."""
        return _first(self.is_local_main_process)

    def print(self, *values: Any, **options: Any) -> None:
        """On the main process of each node."""
        if self.is_local_main_process:
            print(*values, **options)

    def on_main_process(self, function: F) -> F:
        """Decorator: the function runs on the main process and gives None on the others."""
        return _only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: the function runs on the main process of each node."""
        return _only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F) -> F:
        """Decorator: the function runs on the last rank."""
        return _only(lambda: self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: the function runs on the rank process_index."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: the function runs on the rank local_process_index of each node."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only(lambda: self.local_process_index == local_process_index, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, tuple, tensor or data set, or of each value of a mapping; the first ranks have
        one more where the ranks do not divide it. apply_padding: repeats the last one, so that no part is shorter."""
        yield _part(inputs, self.process_index, world_size(), apply_padding)

    def destroy_process_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _first(is_first: bool) -> Iterator[None]:
    # The others wait for the first one, which waits behind the block: one barrier for each rank.
    if not is_first:
        wait_for_all()
    yield
    if is_first:
        wait_for_all()


def _only(applies: Callable[[], bool], function: F) -> F:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) if applies() else None

    return wrapper  # type: ignore[return-value]


def _part(inputs: Any, rank: int, size: int, pad: bool) -> Any:
    if size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        return {name: _part(value, rank, size, pad) for name, value in inputs.items()}
    each, more = divmod(len(inputs), size)
    start = rank * each + min(rank, more)
    end = start + each + (rank < more)
    # More ranks than inputs: those without one are given the last, as Accelerate does, if all parts have to be as long.
    part = inputs[start:end] if end > start or not pad else inputs[-1:]
    return _padded(part, each + bool(more)) if pad else part


def _padded(part: Any, length: int) -> Any:
    missing = length - len(part)
    if missing <= 0 or not len(part):
        return part
    if isinstance(part, Tensor):
        return torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
    if not isinstance(part, Sequence):
        return part
    kind: Any = type(part)
    return kind([*part, *[part[-1]] * missing])


# -- `GradientState` ---------------------------------------------------------------------------------


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
        current = _CURRENT_GRADIENTS.get()
        if current is None:
            raise ConfigError("GradientState() belongs to an Accelerator; make one first")
        return current

    @classmethod
    def begin(
        cls, num_steps: int, *, adjust_scheduler: bool, sync_with_dataloader: bool, sync_each_batch: bool
    ) -> GradientState:
        """The state of a new Accelerator, which `GradientState()` gives from here on."""
        state = object.__new__(cls)
        state.num_steps, state.sync_gradients = num_steps, True
        state.adjust_scheduler, state.sync_with_dataloader = adjust_scheduler, sync_with_dataloader
        state.sync_each_batch, state.dataloader_references = sync_each_batch, []
        _CURRENT_GRADIENTS.set(state)
        return state

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
_CURRENT_GRADIENTS: ContextVar[GradientState | None] = ContextVar("mt_accelerate.state", default=None)


# -- kinds of distribution, with which programs compare `accelerator.distributed_type` ---------------


class DistributedType(StrEnum):
    """Accelerate's names; an Accelerator of mt is MEGATRON_LM with the plugin, else NO, MULTI_CPU or MULTI_GPU."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # the name before Accelerate 0.27, which scripts compare with
    MEGATRON_LM = "MEGATRON_LM"


PRECISIONS = ("no", "fp16", "bf16", "fp8")
USE_MEGATRON = "ACCELERATE_USE_MEGATRON_LM"
USE_CPU = "ACCELERATE_USE_CPU"
OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "--use_megatron_lm --megatron_lm_use_custom_fsdp true is FSDP2",
    "ACCELERATE_USE_DEEPSPEED": "--use_megatron_lm shares the work",
}


class AcceleratorState(Processes):
    """What programs read of `accelerator.state`. `AcceleratorState()` gives that of the Accelerator made last; raises
    ConfigError before there is one."""

    megatron_lm_plugin: MegatronLMPlugin | None
    mixed_precision: str
    distributed_type: DistributedType
    deepspeed_plugin: None = None
    fsdp_plugin: None = None
    is_fsdp2: bool = False
    # What the engines that are refused would have; programs ask for them to find out.
    deepspeed_plugins: None = None
    torch_tp_plugin: None = None
    parallelism_config: None = None
    device_mesh: None = None
    dynamo_plugin: None = None
    fork_launched: bool = False
    debug: bool = False
    initialized: bool = True
    _device: torch.device

    def __new__(cls) -> AcceleratorState:
        current = _CURRENT.get()
        if current is None:
            raise ConfigError("AcceleratorState() belongs to an Accelerator; make one first")
        return current

    @classmethod
    def begin(cls, plugin: MegatronLMPlugin | None, mixed_precision: str, device: torch.device) -> AcceleratorState:
        """The state of a new Accelerator, which `AcceleratorState()` gives from here on."""
        state = object.__new__(cls)
        state.megatron_lm_plugin, state.mixed_precision, state._device = plugin, mixed_precision, device
        state.distributed_type = _type(plugin is not None, device)
        _CURRENT.set(state)
        return state

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def backend(self) -> str | None:
        """What sends between processes; None for one process."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def main_process_index(self) -> int:
        """The last rank with Megatron-LM, which has the last pipeline stage; else the first."""
        return self.num_processes - 1 if self.distributed_type == DistributedType.MEGATRON_LM else 0

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Accelerate's tests call it. Each Accelerator has a state of its own."""


class PartialState(Processes):
    """The processes of a run for a program that prepares no model. Joins them. cpu: also where there is a GPU."""

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        if options:
            raise ConfigError(f"PartialState takes cpu, and no {', '.join(options)}; leave it out")
        self._device = joined_device(cpu)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def distributed_type(self) -> DistributedType:
        return _type(with_megatron(), self._device)

    @property
    def main_process_index(self) -> int:
        return self.num_processes - 1 if with_megatron() else 0

    @property
    def initialized(self) -> bool:
        return True


def with_megatron() -> bool:
    """Whether the launcher has requested Megatron-LM."""
    for variable, instead in OTHER_ENGINES.items():
        if _is_set(variable):
            raise ConfigError(
                f"{variable} is set by the launcher, and mt-accelerate does not have that engine: {instead}"
            )
    return _is_set(USE_MEGATRON)


def start_processes(
    plugin: MegatronLMPlugin | None, mixed_precision: str | None, *, cpu: bool, timeout: timedelta | None = None
) -> AcceleratorState:
    """Joins the ranks that the launcher started. mixed_precision: None is that of ACCELERATE_MIXED_PRECISION.

    Raises ConfigError for an unknown precision.
    """
    precision = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")
    if precision not in PRECISIONS:
        raise ConfigError(f"mixed_precision={precision!r}; it can be {', '.join(PRECISIONS)}")
    return AcceleratorState.begin(plugin, precision, joined_device(cpu, timeout))


def joined_device(cpu: bool, timeout: timedelta | None = None) -> torch.device:
    """This rank's device, after the ranks were joined if they were not yet."""
    device = resolve_device("cpu" if cpu or _is_set(USE_CPU) else "auto")
    # A program may make several Accelerators one after another; the first one has joined the processes.
    if not dist.is_initialized():
        initialize(read_environment(), device.type, _timeouts(timeout))
    return device


def _timeouts(limit: timedelta | None) -> PhaseTimeouts | None:
    """A collective ends with an error after the limit."""
    return None if limit is None else PhaseTimeouts(**dict.fromkeys(vars(PhaseTimeouts()), limit.total_seconds()))


def _type(megatron: bool, device: torch.device) -> DistributedType:
    if megatron:
        return DistributedType.MEGATRON_LM
    if not dist.is_initialized():
        return DistributedType.NO
    return DistributedType.MULTI_GPU if device.type == "cuda" else DistributedType.MULTI_CPU


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


# Programs ask for AcceleratorState() without naming an Accelerator, as Accelerate's shared state allows.
_CURRENT: ContextVar[AcceleratorState | None] = ContextVar("mt_accelerate.state", default=None)
