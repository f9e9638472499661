"""Controls what operations save for their backward passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recompute_saved(x: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """A context in which operations do not save x: their backward passes call `compute` for it, which has to return
    a bitwise equal tensor."""
    # What autograd hands to pack may be another tensor object with the same memory, so identity would not find it.
    memory, shape = x.data_ptr(), x.shape

    def pack(kept: Tensor) -> Tensor | None:
        return None if kept.data_ptr() == memory and kept.shape == shape else kept

    @torch.no_grad()
    def unpack(kept: Tensor | None) -> Tensor:
        return compute() if kept is None else kept

    return saved_tensors_hooks(pack, unpack)
