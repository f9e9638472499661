"""Operands that Hopper's tensor memory accelerator (TMA) can load, and their descriptors.

It copies a rectangular tile for one instruction of one thread, fills with zeros what lies outside of the tensor, and
needs lines that begin at multiples of 16 bytes. It cannot gather rows: those are addressed by pointers.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mt_moe.kernels.availability import is_interpreted
from mt_moe.kernels.device import gpu_properties

ALIGNMENT = 16
"""Bytes."""


def describe(x: Tensor) -> TensorDescriptor | None:
    """The descriptor of a tensor with elements of 2 bytes whose last dimension is contiguous, with blocks that a launch
    sets to those of its tile; None where the tensor or the GPU has none."""
    if not (has_tma(x) and x.numel() and _is_aligned(x)):
        return None
    # A block shape that is valid for any tensor; set_blocks_of_... replaces it before the launch.
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - 1) + [ALIGNMENT])


def has_tma(x: Tensor) -> bool:
    if is_interpreted():
        return True
    return x.element_size() == 2 and gpu_properties(x.device).major >= 9


def _is_aligned(x: Tensor) -> bool:
    # Bytes from one line, or matrix, to the next.
    lines = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and not any(number % ALIGNMENT for number in (x.data_ptr(), *lines))
