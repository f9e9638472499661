"""What computes the recurrence of Mamba-2 over whole sequences: torch, or mt's Triton kernels where they are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.state_space import chunked_scan
from mt_models.blocks.triton_training import training_kernels_lack

Scan = Callable[..., tuple[Tensor, Tensor]]
"""The function `chunked_scan` or another one that computes the same"""


def build_scan(backend: str, ctx: ParallelContext, state_dim: int) -> Scan:
    """backend: "torch", "triton", or "auto", which is torch. Raises ConfigError where "triton" does not serve."""
    if backend != "triton":
        return chunked_scan
    if reason := _triton_lacks(ctx.device.type, ctx.params_dtype, state_dim):
        use = f"{ctx.device.type}, {str(ctx.params_dtype).removeprefix('torch.')}, {state_dim} numbers of the state"
        raise ConfigError(f'model.mamba_scan_backend="triton" cannot serve ({use}): {reason}, or use "auto" or "torch"')
    # A plan has the model on the meta device, where it counts what torch computes.
    return chunked_scan if ctx.device.type == "meta" else _triton_scan


def _triton_lacks(device: str, dtype: torch.dtype, state_dim: int) -> str | None:
    if reason := training_kernels_lack(device, dtype):
        return reason
    from mt_models.blocks.triton_kernels.chunk_launches import WIDEST_KEY

    if state_dim > WIDEST_KEY:
        return f"the state has at most {WIDEST_KEY} numbers for each channel; change model.mamba_state_dim"
    return None


def _triton_scan(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    # Imported here: Triton need not be installed.
    from mt_models.blocks.triton_kernels.state_space import triton_scan

    return triton_scan(*inputs, **options)
