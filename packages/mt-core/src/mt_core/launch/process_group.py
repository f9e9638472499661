"""The rendezvous store and the default process group. A single process needs neither."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mt_core.errors import ConfigError, TrainingError
from mt_core.launch.environment import RankEnvironment
from mt_core.launch.phases import PhaseTimeouts

# A GPU run has gloo too: objects and tensors on the CPU (batches, names of losses) are exchanged without the device.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""gloo connects lazily, at the first message between two ranks. A full mesh of connections at the start does not
scale to 16,384 ranks."""
COUNT, ALL_HERE, LEFT = "arrived", "all-arrived", "left"
WORLD, HOLDER, REFUSED = "world", "holder", "refused"
SHOWN_RANKS = 16
LEAVE_SECONDS = 60.0
"""How long the rank that serves the store waits for the other ranks at the end."""


def initialize(
    environment: RankEnvironment, device_type: str, timeouts: PhaseTimeouts | None = None
) -> dist.Store | None:
    """Select this rank's device, wait for the other ranks, and create the default process group.

    device_type: `cpu` (gloo) or `cuda` (NCCL, and gloo for tensors on the CPU). Returns the store, or None for a
    single process, which gets no group. Raises ConfigError when the device or the address is invalid or two ranks have
    one GPU, TrainingError that names the ranks that did not arrive within `timeouts.init` seconds.
    """
    timeouts = timeouts or PhaseTimeouts()
    device = select_device(environment, device_type)
    if environment.world_size == 1:
        return None
    store = connect_store(environment, timeouts.init)
    _require_same_world(store, environment, device.type)
    users = _users(environment, device)
    # Before _meet(): once all have arrived, the count is final.
    store.add(users, 1)
    _meet(store, environment, timeouts.init)
    # add(key, 0) reads a counter, 0 where it was never set. NCCL would hang or fail later with two ranks on one GPU.
    if device.type == "cuda" and store.add(users, 0) > 1:
        raise _too_few_devices(environment, torch.cuda.device_count())
    os.environ.setdefault(LAZY_GLOO, "1")
    dist.init_process_group(
        BACKENDS[device.type],
        store=dist.PrefixStore("process-group", store),
        rank=environment.rank,
        world_size=environment.world_size,
        # Longer than every phase's limit, so that the phase times out first: its error names the late rank.
        timeout=timedelta(seconds=timeouts.longest + 60),
        # With a device torch creates NCCL's communicator at once, so that later groups are split from it.
        device_id=device if device.type == "cuda" else None,
    )
    return store


def shutdown(environment: RankEnvironment, store: dist.Store | None) -> None:
    """Leave after success. The rank that serves the store waits until the others have left."""
    if store is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    store.add(LEFT, 1)
    if environment.serves_store:
        wait_until_left(store, environment.world_size)


def wait_until_left(store: dist.Store, world_size: int) -> None:
    """On the process that serves the store: wait until all ranks have left, for a minute at most."""
    end = time.monotonic() + LEAVE_SECONDS
    # Ranks that never arrived are not waited for.
    while store.add(COUNT, 0) == world_size > store.add(LEFT, 0) and time.monotonic() < end:
        time.sleep(0.02)


def select_device(environment: RankEnvironment, device_type: str) -> torch.device:
    """Make `local_device` the current device of this process."""
    device = local_device(environment, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def local_device(environment: RankEnvironment, device_type: str) -> torch.device:
    """The device of this rank: one GPU per rank of a node. Raises ConfigError when there are too few."""
    if device_type not in BACKENDS:
        raise ConfigError(f"no communication is known for the device type {device_type!r}; use cpu or cuda")
    if device_type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # One visible GPU is always number 0, whatever the local rank is.
    index = 0 if count == 1 and _has_own_gpu(environment) else environment.local_rank
    if index >= count:
        raise _too_few_devices(environment, count)
    return torch.device("cuda", index)


def _too_few_devices(environment: RankEnvironment, count: int) -> ConfigError:
    return ConfigError(
        f"rank {environment.rank} is number {environment.local_rank} of {environment.local_world_size} on "
        f"{environment.host}, which has {count} CUDA devices; start at most {count} ranks there, "
        f"or look at CUDA_VISIBLE_DEVICES={os.environ.get(VISIBLE_DEVICES, '(not set)')}"
    )


def _has_own_gpu(environment: RankEnvironment) -> bool:
    """Whether the only GPU that this rank sees may be its own: Slurm may bind one to each task, and the script that
    torchrun starts may select one by CUDA_VISIBLE_DEVICES. `mt train --nproc` does neither. Whether another rank sees
    the same GPU is known once all have arrived."""
    if environment.launcher == "slurm":
        return True
    return environment.launcher in ("torchrun", "variables") and VISIBLE_DEVICES in os.environ


def _users(environment: RankEnvironment, device: torch.device) -> str:
    """The key of the number of ranks that have this device. All ranks of a node have its CPU."""
    unit = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "cpu"
    return f"users/{environment.host}/{unit}"


def connect_store(environment: RankEnvironment, timeout: float) -> dist.Store:
    """The store of this run. Raises TrainingError when the address does not answer, ConfigError for a port in use."""
    if environment.master_addr is None or environment.master_port is None:
        raise ConfigError(f"{environment.world_size} ranks need MASTER_ADDR and MASTER_PORT")
    address = f"{environment.master_addr}:{environment.master_port}"
    try:
        store = dist.TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=environment.serves_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except dist.DistNetworkError as error:
        if environment.serves_store:
            raise ConfigError(f"rank 0 cannot listen on {address}: {error}; set another MASTER_PORT") from error
        server = "the launcher of the first node" if environment.launcher_has_store else "rank 0"
        raise TrainingError(
            f"{server} did not answer at {address} within {timeout:g} s; it has not started or has failed, or "
            f"{environment.host} cannot reach it (MASTER_ADDR, MASTER_PORT, a firewall)"
        ) from error
    return run_store(store, environment.attempt)


def run_store(store: dist.Store, attempt: int) -> dist.Store:
    """A view of the store with a key prefix per attempt: a launcher keeps the store between restarts."""
    return dist.PrefixStore(f"mt/{attempt}", store)


def _require_same_world(store: dist.Store, environment: RankEnvironment, device_type: str) -> None:
    """Raise ConfigError, here and on the ranks that wait, where nodes were started with other numbers of ranks or one
    rank twice, or with other types of devices, whose process groups would wait for one another."""
    world = f"{environment.world_size} ranks on {device_type}"
    # compare_set with "" sets the key if it is absent, and returns what is there.
    first, _, host = store.compare_set(WORLD, "", f"{world}@{environment.host}").decode().partition("@")
    holder = store.compare_set(f"{HOLDER}/{environment.rank}", "", _process(environment)).decode()
    problem = None
    if first != world:
        problem = f"{host} was started for {first}, and {environment.host} for {world}"
    elif holder != _process(environment):
        problem = f"rank {environment.rank} was started twice, as {holder} and as {_process(environment)}"
    if problem is not None:
        text = f"{problem}; start every node with the same --nproc, --nnodes and train.device, and its own --node-rank"
        store.set(REFUSED, text)
        store.set(ALL_HERE, "")
        raise ConfigError(text)


def _process(environment: RankEnvironment) -> str:
    return f"process {os.getpid()} on {environment.host}"


def _meet(store: dist.Store, environment: RankEnvironment, timeout: float) -> None:
    """Wait until every rank has arrived."""
    store.set(f"{COUNT}/{environment.rank}", environment.host)
    # The last rank to arrive releases all. Each waits for one key, not for world_size keys.
    if store.add(COUNT, 1) == environment.world_size:
        store.set(ALL_HERE, "")
    try:
        store.wait([ALL_HERE], timedelta(seconds=timeout))
        if store.check([REFUSED]):
            raise ConfigError(store.get(REFUSED).decode())
    except dist.DistStoreError as error:
        missing = [rank for rank in range(environment.world_size) if not store.check([f"{COUNT}/{rank}"])]
        shown = ", ".join(map(str, missing[:SHOWN_RANKS]))
        more = f" and {len(missing) - SHOWN_RANKS} more" if len(missing) > SHOWN_RANKS else ""
        raise TrainingError(
            f"{len(missing)} of {environment.world_size} ranks did not arrive within {timeout:g} s: {shown}{more}"
        ) from error
