"""`AcceleratorState`: the processes of a run, and what the program gave for all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mt_accelerate.distributed_type import DistributedType
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_core.errors import ConfigError
from mt_core.launch.environment import read_environment
from mt_core.launch.process_group import initialize
from mt_core.train.build import resolve_device

PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass
class AcceleratorState:
    """What programs read of `accelerator.state`."""

    megatron_lm_plugin: MegatronLMPlugin
    mixed_precision: str
    device: torch.device
    num_processes: int
    process_index: int
    distributed_type: DistributedType = DistributedType.MEGATRON_LM

    @property
    def is_main_process(self) -> bool:
        """The last rank, which has the last pipeline stage."""
        return self.process_index == self.num_processes - 1

    @property
    def local_process_index(self) -> int:
        return read_environment().local_rank

    @property
    def is_local_main_process(self) -> bool:
        """The last rank of this node."""
        environment = read_environment()
        if environment.world_size == 1:
            return self.is_main_process
        return environment.local_rank == environment.local_world_size - 1


def start_processes(plugin: MegatronLMPlugin, mixed_precision: str | None, *, cpu: bool) -> AcceleratorState:
    """Joins the ranks that the launcher started. mixed_precision: None is that of ACCELERATE_MIXED_PRECISION.

    Raises ConfigError for an unknown precision.
    """
    precision = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no")
    if precision not in PRECISIONS:
        raise ConfigError(f"mixed_precision={precision!r}; it can be {', '.join(PRECISIONS)}")
    on_cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    device = resolve_device("cpu" if on_cpu else "auto")
    # A program may make several Accelerators one after another; the first one has joined the processes.
    if not dist.is_initialized():
        initialize(read_environment(), device.type)
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return AcceleratorState(plugin, precision, device, size, rank)
