"""What computes the recurrences of Mamba-1 and Mamba-2: torch, or mt's Triton kernels where they are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.kernels.choice import Kernels
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.selective_scan import selective_scan
from mt_models.blocks.state_space import chunked_scan, recurrent_scan
from mt_models.blocks.triton_training import training_kernels_lack

Scan = Callable[..., tuple[Tensor, Tensor]]
"""(x, dt, a, b, c, *, state, segment_ids) -> outputs and the state; over whole sequences with chunk_size too: see
`chunked_scan` and `selective_scan`."""


def _triton_scan(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    # Imported here: Triton need not be installed.
    from mt_models.blocks.triton_kernels.state_space import triton_scan

    return triton_scan(*inputs, **options)


def _triton_step(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.state_space_step import triton_state_step

    return triton_state_step(*inputs, **options)


def _triton_selective_scan(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.selective_scan import triton_selective_scan

    return triton_selective_scan(*inputs, **options)


def _triton_selective_step(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from mt_models.blocks.triton_kernels.state_space_step import triton_selective_step

    return triton_selective_step(*inputs, **options)


class StateRecurrence(NamedTuple):
    """The implementations of one recurrence."""

    whole: Scan
    step: Scan
    triton: Scan
    triton_step: Scan
    widest_state: int
    """Numbers of the state of a channel that the kernels take"""


STATE_SPACE = StateRecurrence(chunked_scan, recurrent_scan, _triton_scan, _triton_step, 128)
"""Mamba-2"""
SELECTIVE = StateRecurrence(selective_scan, selective_scan, _triton_selective_scan, _triton_selective_step, 64)
"""Mamba-1"""


class Scans(NamedTuple):
    whole: Scan
    """Whole sequences, with gradients"""
    step: Scan
    """Single positions from a state, as decoding takes them"""
    by: str

    def note(self, name: str, kernels: Kernels) -> None:
        """Add a line to what a run on a GPU prints."""
        kernels.note(f"{name}: sequences by {self.by}, steps of decoding by {self.by}")


def build_scans(recurrence: StateRecurrence, backend: str, ctx: ParallelContext, state_dim: int) -> Scans:
    """backend: "torch", "triton", or "auto", which is torch. Raises ConfigError where "triton" does not serve."""
    plain = Scans(recurrence.whole, recurrence.step, "torch")
    if backend != "triton":
        return plain
    if reason := _triton_lacks(recurrence, ctx, state_dim):
        use = f"{ctx.device.type}, {str(ctx.params_dtype).removeprefix('torch.')}, {state_dim} numbers of the state"
        raise ConfigError(f'model.mamba_scan_backend="triton" cannot serve ({use}): {reason}, or use "auto" or "torch"')
    if ctx.device.type == "meta":
        # A plan has the model on the meta device, where it counts what torch computes.
        return plain._replace(by="triton")
    return Scans(recurrence.triton, _without_gradients(recurrence.triton_step, recurrence.step), "triton")


def _triton_lacks(recurrence: StateRecurrence, ctx: ParallelContext, state_dim: int) -> str | None:
    if reason := training_kernels_lack(ctx.device.type, ctx.params_dtype):
        return reason
    if state_dim > (widest := recurrence.widest_state):
        return f"the state has at most {widest} numbers for each channel; change model.mamba_state_dim"
    return None


def _without_gradients(step: Scan, plain: Scan) -> Scan:
    """`step`, or `plain` where gradients are asked for."""

    def advance(*inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return (plain if wanted else step)(*inputs, **options)

    return advance
