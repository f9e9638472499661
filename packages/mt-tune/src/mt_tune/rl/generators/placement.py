"""Where processes that generate run: an equal number on each node, on the devices behind those of training."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch

from mt_core.errors import ConfigError
from mt_core.parallel.context import Axis
from mt_core.parallel.first_rank import all_gather_objects

MASTER_ADDRESS = "MASTER_ADDR"


@dataclass(frozen=True)
class Placement:
    """starters: ranks of training that start generators, one of each node. each: generators of a node. address: at
    which the first node is found. first_device: number of the first generator's device on a node."""

    starters: tuple[int, ...]
    each: int
    address: str
    first_device: int

    def ranks_of(self, starter: int) -> range:
        """Ranks among the generators of those that this rank of training starts; none for most."""
        if starter not in self.starters:
            return range(0)
        first = self.starters.index(starter) * self.each
        return range(first, first + self.each)

    def device_of(self, rank: int, device_type: str) -> str:
        return "cpu" if device_type == "cpu" else f"{device_type}:{self.first_device + rank % self.each}"


def placement(generators: int, world: Axis, device: torch.device) -> Placement:
    """Collective over the processes that train. Raises ConfigError where nodes cannot have equal numbers, or a node has
    too few devices."""
    hosts = all_gather_objects((host_name(), os.environ.get(MASTER_ADDRESS), visible(device)), world)
    names = [name for name, _, _ in hosts]
    # Whatever has launched training: a node is where processes have the same host name.
    starters = tuple(names.index(name) for name in dict.fromkeys(names))
    if generators % len(starters):
        raise ConfigError(
            f"rl.generator_processes={generators} cannot be the same on each of {len(starters)} nodes; give a multiple"
        )
    each, training = generators // len(starters), max(map(names.count, names))
    for name, _, devices in hosts:
        if devices is not None and training + each > devices:
            raise ConfigError(
                f"rl.generator_processes={generators}: {training} processes train and {each} generate on {name}, each "
                f"with a GPU, and training sees {devices}; start fewer that train (--nproc), or let them generate "
                "themselves (rl.generator_processes=0)"
            )
    first, master, _ = hosts[0]
    return Placement(starters, each, "127.0.0.1" if len(starters) == 1 else master or first, training)


def host_name() -> str:
    return socket.gethostname()


def visible(device: torch.device) -> int | None:
    """GPUs that this process sees; None on a CPU."""
    return torch.cuda.device_count() if device.type == "cuda" else None
