"""Whether Triton kernels of blocks can be launched."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_triton() -> bool:
    """Whether Triton is installed and there is a GPU."""
    return find_spec("triton") is not None and torch.cuda.is_available()
