"""How much memory the cache may take."""

from __future__ import annotations

import os

import torch

from mt_core._torch_compat import free_cuda_bytes
from mt_core.config.schema import InferenceConfig

SHARE_OF_FREE = 0.5
"""Of the free memory, when the configuration does not say."""


def cache_bytes(options: InferenceConfig, device: torch.device) -> int:
    if options.cache_memory_gb is not None:
        return int(options.cache_memory_gb * 2**30)
    return int(free_bytes(device) * SHARE_OF_FREE)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return free_cuda_bytes(device)
    # Pages that are free without reclaiming the page cache: an underestimate, on the safe side.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
