"""The rate of matrix products that a device reaches at most."""

from __future__ import annotations

import statistics
import time

import torch

from mt_core.train.reporting.step_metrics import peak_of_name

SIZE, ROUNDS = 1536, 5


def roof_tflops(device: str) -> float | None:
    """TFLOP/s: of a known GPU in bf16; of a CPU, measured by a product of fp32 matrices with the threads of this
    process. None for a GPU that is not known."""
    if device == "cuda":
        return peak_of_name(torch.cuda.get_device_name())
    x = torch.randn(SIZE, SIZE)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - began)
    return 2.0 * SIZE**3 / statistics.median(seconds[1:]) / 1e12
