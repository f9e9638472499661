"""Hardware parameters of the machines for which times are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


def get_machine(name: str) -> Machine:
    """Raises ConfigError that lists the names."""
    if name not in MACHINES:
        raise ConfigError(
            f'there is no machine "{name}"{did_you_mean(name, MACHINES)}; it can be {", ".join(MACHINES)}'
        )
    return MACHINES[name]
