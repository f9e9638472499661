"""The properties of a GPU, which every launch reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache  # torch resolves the device again at each call, which takes as long as a part of the launch
def gpu_properties(device: torch.device) -> Any:
    """torch's: major, multi_processor_count, shared_memory_per_block_optin, ..."""
    return torch.cuda.get_device_properties(device)
