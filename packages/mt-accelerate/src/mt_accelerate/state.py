"""`AcceleratorState` and `PartialState`: the processes of a run, and what the program gave for all of them."""

from __future__ import annotations

import os
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mt_accelerate.distributed_type import DistributedType
from mt_accelerate.gradient_state import GradientState as GradientState
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.processes import Processes
from mt_core.errors import ConfigError
from mt_core.launch.environment import read_environment
from mt_core.launch.phases import PhaseTimeouts
from mt_core.launch.process_group import initialize
from mt_core.train.build import resolve_device

PRECISIONS = ("no", "fp16", "bf16", "fp8")
USE_MEGATRON = "ACCELERATE_USE_MEGATRON_LM"
USE_CPU = "ACCELERATE_USE_CPU"


class AcceleratorState(Processes):
    """What programs read of `accelerator.state`. `AcceleratorState()` gives that of the Accelerator made last; raises
    ConfigError before there is one."""

    megatron_lm_plugin: MegatronLMPlugin | None
    mixed_precision: str
    distributed_type: DistributedType
    deepspeed_plugin: None = None
    fsdp_plugin: None = None
    is_fsdp2: bool = False
    fork_launched: bool = False
    initialized: bool = True
    _device: torch.device

    def __new__(cls) -> AcceleratorState:
        found = _CURRENT.get()
        if found is None:
            raise ConfigError("AcceleratorState() belongs to an Accelerator; make one first")
        return found

    @classmethod
    def begin(cls, plugin: MegatronLMPlugin | None, mixed_precision: str, device: torch.device) -> AcceleratorState:
        """That of a new Accelerator."""
        made = object.__new__(cls)
        made.megatron_lm_plugin, made.mixed_precision, made._device = plugin, mixed_precision, device
        made.distributed_type = _type(plugin is not None, device)
        _CURRENT.set(made)
        return made

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def main_process_index(self) -> int:
        """The last rank with Megatron-LM, which has the last pipeline stage; else the first."""
        return self.num_processes - 1 if self.distributed_type == DistributedType.MEGATRON_LM else 0


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
