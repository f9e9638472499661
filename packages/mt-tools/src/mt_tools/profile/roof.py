"""The rate of matrix products that a device reaches at most."""

from __future__ import annotations

import time

import torch

from mt_core.train.reporting.step_metrics import peak_of_name

SIZES, SECONDS = (512, 1024, 1536), 0.2
"""Sizes of square matrices, and the seconds for each size."""


def roof_tflops(device: str) -> float | None:
    """TFLOP/s: of a known GPU in bf16; of a CPU, measured by products of fp32 matrices with the threads of this
    process, as those have that recorded. None for a GPU that is not known."""
    if device == "cuda":
        return peak_of_name(torch.cuda.get_device_name())
    return max(map(_best_rate, SIZES))


def _best_rate(size: int) -> float:
    """TFLOP/s of the fastest of several products: another program may have taken a part of the others' time."""
    x, out = torch.randn(size, size), torch.empty(size, size)
    torch.mm(x, x, out=out)
    end, best = time.perf_counter() + SECONDS, float("inf")
    while (began := time.perf_counter()) < end:
        torch.mm(x, x, out=out)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best / 1e12
