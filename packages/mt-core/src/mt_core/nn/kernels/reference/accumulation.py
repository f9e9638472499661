"""The dtype in which the references compute."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
