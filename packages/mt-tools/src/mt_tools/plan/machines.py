"""Hardware parameters of the machines for which times are estimated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mt_core.errors import ConfigError, did_you_mean

GIB = 2.0**30


@dataclass(frozen=True)
class Machine:
    """Nodes of several devices. Speeds are per device, in FLOP/s and bytes/s, one way."""

    name: str
    flops: float
    """Dense bf16 peak, as the vendor states it."""
    capability: tuple[int, int]
    """Compute capability."""
    memory_gib: float
    memory_speed: float
    node_speed: float
    """Between devices of a node."""
    network_speed: float
    """Between nodes."""
    node_size: int = 8
    efficiency: float = 0.6
    """Fraction of `flops` that matrix products reach, including the elementwise kernels between them."""
    latency: float = 1e-5
    """Seconds per message, independent of its size."""
    reserved_gib: float = 5.0
    """GiB of memory that is not available: CUDA context, libraries, fragmentation."""
    is_cpu: bool = False
    has_speed: bool = True
    """Whether the speeds are its own. False: layouts are only compared by them, and no time is shown."""
    is_assumed: bool = False
    """Whether nobody named it."""

    @property
    def usable_gib(self) -> float:
        return self.memory_gib - self.reserved_gib


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            # NVLink 4: 900 GB/s both ways together; InfiniBand NDR: 400 Gb/s a device.
            Machine("h100", 989.4e12, (9, 0), 79.6, 3.35e12, 450e9, 50e9),
            Machine("h200", 989.4e12, (9, 0), 139.8, 4.8e12, 450e9, 50e9),
            # NVLink 3: 600 GB/s both ways together; InfiniBand HDR: 200 Gb/s a device.
            Machine("a100", 312e12, (8, 0), 79.2, 2.04e12, 300e9, 25e9),
        )
    }
)


DEFAULT = "h100"
"""What is assumed where no machine is named."""
THIS = "this"
"""Name of the computer that the command runs on."""
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


def get_machine(name: str | None, processes: int = 1) -> Machine:
    """name: None for the assumed machine, `DEFAULT`.
    processes: of the computer that the command runs on, which share its memory where it has no GPU.

    Raises ConfigError that lists the names.
    """
    if name is None:
        return replace(MACHINES[DEFAULT], is_assumed=True)
    if name == THIS:
        return this_machine(processes)
    if name not in MACHINES:
        raise ConfigError(
            f'there is no machine "{name}"{did_you_mean(name, MACHINES)}; it can be {", ".join([*MACHINES, THIS])}'
        )
    return MACHINES[name]


def this_machine(processes: int = 1) -> Machine:
    """The first GPU of this computer; its memory, divided among the processes, where it has none."""
    import torch

    if not torch.cuda.is_available():
        memory = _memory() / GIB / processes
        return replace(
            MACHINES["h100"], name="this CPU", memory_gib=memory, reserved_gib=0.0, is_cpu=True, has_speed=False
        )
    about = torch.cuda.get_device_properties(0)
    known = next((machine for key, machine in MACHINES.items() if key in about.name.lower()), None)
    machine_type = known or replace(MACHINES["h100"], name=about.name, has_speed=False)
    return replace(machine_type, memory_gib=about.total_memory / GIB, capability=(about.major, about.minor))


def _memory() -> int:
    """Bytes of this computer, or of its container where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_MEMORY.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    # cgroup v2 writes "max" where there is no limit.
    return min(physical, int(limit)) if limit.isdigit() else physical


def assumption(machine: Machine) -> str:
    """A line for tables, empty where the machine was named."""
    if not machine.is_assumed:
        return ""
    others = ", ".join(name for name in MACHINES if name != machine.name)
    return f"machine {machine.name} is assumed; --machine takes {THIS} (this computer), {others}"
