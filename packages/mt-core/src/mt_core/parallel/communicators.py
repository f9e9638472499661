"""The communicators of process groups: NCCL's options, and memory that NCCL reads and writes in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from mt_core._torch_compat import backend_of, time_limit_of
from mt_core.errors import ConfigError

# CTAs are the thread blocks that NCCL may occupy on a GPU; fewer leave more of it to computation.
NCCL_CONFIG = ("min_ctas", "max_ctas", "cga_cluster_size", "net_name")
"""Fields of ncclConfig_t that can be set, by their names there and in torch."""


@dataclass(frozen=True)
class CommunicatorOptions:
    """What is None, or false, is left to NCCL and torch."""

    is_high_priority_stream: bool = False
    timeout_minutes: float | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None

    @property
    def timeout(self) -> timedelta | None:
        return None if self.timeout_minutes is None else timedelta(minutes=self.timeout_minutes)

    @property
    def of_nccl(self) -> Mapping[str, Any]:
        """Those that are set and that only NCCL has."""
        names = ("is_high_priority_stream", *NCCL_CONFIG)
        # None and False are the unset values.
        return {name: value for name in names if (value := getattr(self, name)) not in (None, False)}


DEFAULT = CommunicatorOptions()


def group_arguments(options: CommunicatorOptions, world: dist.ProcessGroup) -> dict[str, Any]:
    """Arguments of dist.new_group. Without a time limit of its own a group has that of the world, and not torch's."""
    # dist.new_group would take torch's default (10 minutes with NCCL), which the user's limit of the world may exceed.
    limit = options.timeout or time_limit_of(world)
    chosen: dict[str, Any] = {} if limit is None else {"timeout": limit}
    return chosen | ({"pg_options": nccl_options(options, limit)} if options.of_nccl else {})


def nccl_options(options: CommunicatorOptions, limit: timedelta | None) -> dist.ProcessGroupNCCL.Options:
    """limit: of an operation. torch takes it twice, and warns where the two differ."""
    group_options = dist.ProcessGroupNCCL.Options()
    if limit is not None:
        # Options carry a limit of their own besides the argument `timeout` of new_group.
        group_options._timeout = limit
    group_options.is_high_priority_stream = options.is_high_priority_stream
    for name in NCCL_CONFIG:
        if (value := getattr(options, name)) is not None:
            setattr(group_options.config, name, value)
    return group_options


def require_device(communicators: Mapping[str, CommunicatorOptions], device: torch.device) -> None:
    """Raises ConfigError for options of NCCL where gloo communicates."""
    for axis, options in communicators.items():
        if device.type != "cuda" and options.of_nccl:
            name, value = next(iter(options.of_nccl.items()))
            raise ConfigError(
                f"parallel.nccl_communicators.{axis}.{name}={value} is an option of NCCL, and gloo communicates on "
                f"{device.type}; remove it, or set train.device=cuda (timeout_minutes works with both)"
            )


def require_several_ranks(
    communicators: Mapping[str, CommunicatorOptions], members: Mapping[Any, Sequence[Sequence[int]]]
) -> None:
    """Raises ConfigError for options of an axis along which nothing is sent. members: axis -> its groups of ranks."""
    for axis in communicators:
        if max(map(len, members[axis]), default=1) == 1:
            raise ConfigError(
                f"parallel.nccl_communicators.{axis} has options of communicators between the ranks of {axis}, and "
                "that axis has one rank in this layout; remove it"
            )


@contextmanager
def user_buffers(group: dist.ProcessGroup, device: torch.device) -> Iterator[torch.cuda.MemPool]:
    """What is allocated inside is memory of NCCL, which the group's communicator registers: its collectives then read
    and write it in place. The memory lives as long as the pool.

    Like the creation of a group this is collective, as NCCL exchanges the addresses.
    """
    backend = backend_of(group, device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, device):
        yield pool
    backend.register_mem_pool(pool)


# -- peer access, which products overlapped with collectives need -----------------------------------------


def peer_access_objection(ranks: Sequence[int], ranks_of_host: int) -> str | None:
    """Why the GPUs of these ranks cannot read one another's memory; None if they can.

    ranks_of_host: of the world on each host, which are consecutive and have a GPU each.
    """
    # torchrun's numbering: rank = host * ranks_of_host + local rank, and local rank i uses GPU i.
    hosts = {rank // ranks_of_host for rank in ranks}
    if len(hosts) > 1:
        return f"ranks {', '.join(map(str, ranks))} are on {len(hosts)} hosts, and memory is shared inside one host"
    devices = [rank % ranks_of_host for rank in ranks]
    for reader, owner in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(reader, owner):
            return f"GPU {reader} has no peer access to the memory of GPU {owner}"
    return None
