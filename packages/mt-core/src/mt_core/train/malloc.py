"""Thresholds of glibc's malloc, so that freed tensors are used again instead of going back to the system.

By default glibc maps each allocation above 32 MiB by itself and unmaps it when it is freed. The pages of the next
tensor of that size are then faulted in, and filled with zeros, again: up to a quarter of a training step on a CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from torch import nn

from mt_core.config.schema import Config
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.memory import GIB, free_bytes, needed_bytes

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
