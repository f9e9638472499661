"""What launches share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def multiprocessors(x: Tensor) -> int:
    """Of x's device; a small number in the interpreter."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 4


def warps_for(elements: int) -> int:
    """Warps of a program that holds a tile of this many elements: 8 or more of them a thread, up to 32 warps."""
    # 512 = 32 threads of a warp x 16 elements. Under 4 warps a program does not fill the four schedulers of a
    # multiprocessor; 32 warps are CUDA's largest block of 1024 threads.
    return min(max(elements // 512, 4), 32)
