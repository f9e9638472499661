"""Memory for large tensors that are written once and given back."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo

LARGE_BYTES = 4 << 20


def empty(info: TensorInfo) -> Tensor:
    """A tensor without values. A large one is in huge pages where the system has them: that it is given 512 small ones
    in place of one costs as much as dequantizing into them."""
    if info.num_bytes < LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(info.shape, dtype=info.dtype)
    # Private: shared memory, which is the default, has settings of its own.
    memory = mmap.mmap(-1, info.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=info.dtype).view(info.shape)
