"""Every attention backend that can run here, in one process: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mt_core.interfaces import AttentionRequest
from mt_core.nn.attention import AttentionPattern
from mt_core.plugins import PluginHost
from mt_core.specs import ATTENTION_BACKENDS
from mt_tools.bench.device_timing import medians
from mt_tools.bench.machine import Machine
from mt_tools.bench.report import Case


@dataclass(frozen=True)
class AttentionShape:
    """documents: of equal length, in each sequence."""

    batch: int
    sequence: int
    heads: int
    groups: int
    head_dim: int
    documents: int = 1
    window: int | None = None

    @property
    def label(self) -> str:
        shape = f"{self.batch} x {self.sequence}, {self.heads}/{self.groups} heads of {self.head_dim}"
        documents = f", {self.documents} documents" if self.documents > 1 else ""
        return shape + documents + (f", window {self.window}" if self.window is not None else "")

    @property
    def forward_flops(self) -> float:
        """FLOPs of scores and values over the visible keys; a multiply-add counts as 2."""
        length = self.sequence // self.documents
        # A query sees up to `reach` keys: the first ones 1, 2, ..., the others `reach`.
        reach = min(self.window or length, length)
        seen = reach * (reach + 1) / 2 + (length - reach) * reach
        return 4.0 * self.batch * self.documents * seen * self.heads * self.head_dim  # Q K^T and P V


SHAPES = (
    AttentionShape(1, 8192, 32, 8, 128),
    AttentionShape(4, 4096, 32, 8, 64),
    AttentionShape(32, 1024, 12, 12, 64),
    AttentionShape(1, 8192, 32, 8, 128, documents=8),
    AttentionShape(1, 8192, 32, 8, 128, window=1024),
)
SMALL = (
    AttentionShape(1, 64, 4, 2, 16),
    AttentionShape(1, 64, 4, 2, 16, documents=4),
    AttentionShape(1, 64, 4, 2, 16, window=16),
)
TOO_LARGE_FOR_SCORES = 2 * 2**30
"""Bytes of fp32 scores above which the eager reference is left out."""


def measure_attention(machine: Machine, rounds: int, host: PluginHost) -> Iterator[Case]:
    for shape in SHAPES if machine.is_gpu else SMALL:
        yield measure(shape, machine, rounds, host)


def measure(shape: AttentionShape, machine: Machine, rounds: int, host: PluginHost) -> Case:
    """TFLOP/s count the backward pass as 2.5 forward passes (five matrix products instead of two)."""
    cores, refused = cores_for(shape, machine, host)
    q, k, v = tensors(shape, machine)
    pattern = AttentionPattern(segment_ids=segments(shape, machine), window=shape.window)
    ones = torch.ones_like(q)
    # Without autograd: neither log-sum-exp nor inputs are kept.
    forward = {name: [torch.no_grad()(partial(core, q, k, v, pattern, 0.0))] for name, core in cores.items()}
    step = {name: [partial(_step, core, (q, k, v), pattern, ones)] for name, core in cores.items()}
    return {
        "name": f"attention {shape.label}",
        "cannot": refused,
        "forward": _rows(medians(forward, machine.device, rounds), shape.forward_flops, machine),
        "step": _rows(medians(step, machine.device, rounds), 3.5 * shape.forward_flops, machine),
    }


def cores_for(
    shape: AttentionShape, machine: Machine, host: PluginHost
) -> tuple[dict[str, Callable[..., Tensor]], dict[str, str]]:
    """(core by backend, reasons why the others cannot run)"""
    request = AttentionRequest(
        device_type=machine.device.type,
        dtype=machine.dtype_name,
        head_dim=shape.head_dim,
        num_heads=shape.heads,
        num_query_groups=shape.groups,
        causal=True,
        segments=shape.documents > 1,
        bias=False,
        dropout=0.0,
        deterministic=False,
        window=shape.window,
    )
    cores, refused = {}, {}
    for spec in host[ATTENTION_BACKENDS]:
        answer = spec.supports.load()(request)
        if (
            answer is True
            and spec.name == "eager"
            and shape.batch * shape.heads * shape.sequence**2 * 4 > TOO_LARGE_FOR_SCORES
        ):
            answer = "its scores would fill the memory"
        if answer is True:
            cores[spec.name] = spec.build.load()(request, softmax_in_fp32=True)
        else:
            refused[spec.name] = str(answer)
    return cores, refused


def tensors(shape: AttentionShape, machine: Machine) -> list[Tensor]:
    """q [B, S, N, D], k and v [B, S, G, D]"""
    options: dict[str, Any] = {"device": machine.device, "dtype": machine.dtype}
    heads = (shape.heads, shape.groups, shape.groups)
    return [torch.randn(shape.batch, shape.sequence, n, shape.head_dim, **options).requires_grad_() for n in heads]


def segments(shape: AttentionShape, machine: Machine) -> Tensor | None:
    """[B, S]"""
    if shape.documents == 1:
        return None
    ids = torch.arange(shape.documents, device=machine.device)
    return ids.repeat_interleave(shape.sequence // shape.documents).expand(shape.batch, -1)


def _step(core: Callable[..., Tensor], inputs: tuple[Tensor, ...], pattern: AttentionPattern, grad: Tensor) -> None:
    # autograd.grad: gradients are not accumulated into inputs, which would be timed as well.
    torch.autograd.grad(core(*inputs, pattern, 0.0), inputs, grad)


def _rows(taken: dict[str, float], flops: float, machine: Machine) -> dict[str, dict[str, float]]:
    return {
        name: {
            "ms": seconds * 1e3,
            "tflops": flops / seconds / 1e12,
            "percent_of_floor": 100.0 * flops / machine.gemm_rate / seconds,
        }
        for name, seconds in taken.items()
    }
