"""What mt's Triton kernels of whole sequences need of a run: they are used where they are named, or refused."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def training_kernels_lack(device: str, dtype: torch.dtype) -> str | None:
    """What the kernels need and which key to change; None if nothing. device: "meta" in a plan, which launches none."""
    if find_spec("triton") is None:
        return "Triton is not installed; install it"
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"  # for tests
    if device not in ("cuda", "meta") and not interpreted:
        return "its kernels run on a CUDA device; set train.device=cuda"
    if dtype != torch.bfloat16 and not interpreted:
        return "its kernels compute in bf16, with states in fp32; set precision.dtype=bf16"
    return None
