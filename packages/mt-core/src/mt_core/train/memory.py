"""Checks that weights, gradients and optimizer state fit into memory before they are allocated; malloc's thresholds."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mt_core._torch_compat import free_cuda_bytes
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.optim.base import probe_state
from mt_core.optim.finalize_grads import SHARDS
from mt_core.optim.master_weights import trained_parameters
from mt_core.optim.muon import is_matrix
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.auto_choices import REMAINDERS

GIB = 2.0**30
FP32 = 4
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Needed:
    """Bytes needed by one rank. parameters: number of elements. Activations and buffers are not counted."""

    parameters: int
    weights: float
    gradients: float
    state: float
    """Optimizer state, including fp32 master weights."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state


class Budget(TorchFunctionMode):
    """Limits the bytes that `torch.empty`, which allocates all parameters, returns; past it returns meta tensors."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.left = size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only parameters are allocated so; temporaries of initialization come later.
        if func is not torch.empty or str((kwargs or {}).get("device")) == "meta":
            return func(*args, **(kwargs or {}))
        # Meta tensors have shape and dtype and no memory, so the size is found without allocating it.
        planned = func(*args, **{**(kwargs or {}), "device": "meta"})
        self.left -= planned.numel() * planned.element_size()
        # Past the budget the model is finished on the meta device, so that its whole size can be reported.
        return func(*args, **(kwargs or {})) if self.left >= 0 else planned


class WithoutMemory(TorchFunctionMode):
    """`torch.empty`, which allocates all parameters and nothing else, returns meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {**(kwargs or {}), "device": "meta"} if func is torch.empty else kwargs or {}
        return func(*args, **options)


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Give memory to the parameters that have none, on the device of the model. Shared ones stay shared."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and device.type != "meta":
                memory = torch.empty_like(parameter, device=device)
                replaced.setdefault(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
                module._parameters[name] = replaced[parameter]


def build_within_memory(
    build: Callable[[], nn.Module], config: Config, ctx: ParallelContext, host: PluginHost
) -> nn.Module:
    """build(), the model of this rank with uninitialized weights. Raises ConfigError with the sizes when weights,
    gradients and optimizer state exceed the free memory. A system that overcommits memory would let the run start
    and then swap or kill it."""
    if not config.train.check_memory:
        return build()
    if ctx.device.type == "cuda" and torch.cuda.memory_allocated(ctx.device):
        gc.collect()  # A model that this process trained before may stand in reference cycles.
    free = free_bytes(ctx.device)
    if free is None:
        return build()
    # A model that fits is built once. One that does not is refused below, since the sizes exceed `free`.
    with Budget(free):
        model = build()
    needed = needed_bytes(model, config, ctx, host)
    if needed.total > free:
        raise ConfigError(_refusal(needed, free, ctx))
    return model


def _refusal(needed: Needed, free: float, ctx: ParallelContext) -> str:
    parts = {"weights": needed.weights, "gradients": needed.gradients, "optimizer state": needed.state}
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return (
        f"rank {ctx.world.rank} of {ctx.world.size} would hold {needed.parameters:,} parameters in "
        f"{needed.total / GIB:.1f} GiB ({listed}; activations come on top), and {free / GIB:.1f} GiB of "
        f"{ctx.device.type} memory are free for it; train on more processes (mt plan --search "
        "shows which layouts fit) or a smaller model, or set train.check_memory=false to try anyway"
    )


def needed_bytes(model: nn.Module, config: Config, ctx: ParallelContext, host: PluginHost) -> Needed:
    """Bytes needed to train a rank's model, which may be on the meta device."""
    parallel, precision = config.parallel, config.precision
    layouts, each = parameter_layouts(model), probe_state(config, host)
    in_fp32 = precision.dtype == "fp32" or precision.accumulate_allreduce_grads_in_fp32
    weights = gradients = state = 0.0
    for name, parameter in trained_parameters(model):
        size, itemsize = parameter.numel(), parameter.element_size()
        # Number of ranks that the optimizer state of this parameter is divided over.
        shards = ctx.axis(SHARDS[layouts[name].replicas][0]).size
        owned = size / shards if parallel.use_distributed_optimizer or parallel.use_torch_fsdp2 else size
        # FSDP2 shards weights and gradients too; the distributed optimizer keeps both whole.
        elements = owned if parallel.use_torch_fsdp2 else size
        weights += elements * itemsize
        gradients += elements * (FP32 if in_fp32 else itemsize)
        # Optimizer state of the rank's own elements, and what completes its 16-bit weights to fp32.
        state += each.of(is_matrix(name, layouts[name]), int(owned)) + owned * completed_bytes(config, itemsize)
    return Needed(sum(p.numel() for p in model.parameters()), weights, gradients, state)


def completed_bytes(config: Config, itemsize: int) -> int:
    """Bytes of the fp32 copies of 16-bit weights. Their low 16 bits are a part of the optimizer's state."""
    return 0 if itemsize == FP32 or getattr(config.optimizer, "main_weights", None) == REMAINDERS else FP32


def free_bytes(device: torch.device, environ: Mapping[str, str] = os.environ) -> float | None:
    """Free memory of a device for this rank; ranks of a node share its host memory. None if unknown."""
    if device.type == "cuda":
        return float(free_cuda_bytes(device))
    # In a container the host's /proc/meminfo shows more than the cgroup allows.
    available = [size for size in (_available_memory(), _left_of_cgroup()) if size is not None]
    ranks = int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")))
    return min(available) / ranks if available else None


def _available_memory() -> float | None:
    """Free memory plus what the system can reclaim, such as the page cache."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return _physical_memory()
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    # /proc/meminfo counts in KiB.
    return float(available[0]) * 1024 if available else _physical_memory()


def _physical_memory() -> float | None:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None


def _left_of_cgroup() -> float | None:
    """Remaining memory under the cgroup limit; None without a limit."""
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    # "max" stands for no limit.
    return float(limit) - float(used) if limit.isdigit() else None


# -- thresholds of glibc's malloc, so that freed tensors are used again ------------------------------
#
# By default glibc maps each allocation above 32 MiB separately and unmaps it when it is freed. The pages of the next
# tensor of that size are then faulted in, and filled with zeros, again: up to a quarter of a training step on a CPU.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from malloc.h."""
LARGEST = 2**31 - 1
"""mallopt takes an int."""
SHARE_OF_FREE_MEMORY = 0.25
"""That weights, gradients and optimizer state may take: freed tensors of other sizes come on top of the activations."""


def keep_freed_memory(config: Config, model: nn.Module, ctx: ParallelContext, host: PluginHost) -> str | None:
    """Raise the thresholds for this process where train.keep_freed_memory is set and memory allows.

    Returns what was done, for the run's summary; None where there is nothing to do: on a GPU, without glibc, or where
    the user has set the thresholds.
    """
    if not config.train.keep_freed_memory or ctx.device.type != "cpu" or not is_glibc() or has_own_settings():
        return None
    free, needed = free_bytes(ctx.device), needed_bytes(model, config, ctx, host).total
    if free is None or needed > SHARE_OF_FREE_MEMORY * free:
        left = "unknown" if free is None else f"{free / GIB:.1f} GiB"
        return f"malloc as it is: weights, gradients and state take {needed / GIB:.1f} GiB, free memory is {left}"
    return "malloc keeps freed memory (train.keep_freed_memory)" if raise_thresholds() else None


def is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # Windows, macOS, musl
        return False


def has_own_settings(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user's environment sets one of the thresholds (mallopt(3), GLIBC_TUNABLES)."""
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    return any(name in environ for name in names) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")


def raise_thresholds() -> bool:
    """Whether glibc accepted both."""
    # The symbols of this process, whose malloc is the one that torch uses.
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(option, LARGEST) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
