"""Where the time of a step goes, by kind of kernel, from torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

KINDS = (
    ("attention", ("attention", "flash", "fmha", "sdpa")),
    ("optimizer", ("adam", "foreach", "multi_tensor")),
    ("loss", ("cross_entropy", "nll", "log_softmax")),
    ("products", ("gemm", "cutlass", "cublas", "nvjet", "addmm", "aten::mm", "aten::bmm", "matmul")),
    ("norms", ("norm",)),
    ("copies", ("memcpy", "memset", "copy_", "fill_", "zero_")),
)
"""The first kind with a pattern that occurs in the kernel's name; kernels without a match are elementwise."""


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, words in KINDS if any(word in lowered for word in words)), "elementwise and others")


def time_shares(step: Callable[[], None], steps: int, device: torch.device) -> dict[str, Any]:
    """{"time_shares": kind -> fraction of the busy time, "idle_share": fraction of the time in which the GPU is idle}.

    On a CPU there is no idle share.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        # self time: an operator's own, without the operators it calls.
        rows = ((row.key, float(row.self_cpu_time_total)) for row in profiler.key_averages())
        return {"time_shares": shares(row for row in rows if row[0].startswith("aten::"))}
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    found = shares((name, end - start) for name, start, end in spans)
    return {"time_shares": found, "idle_share": idle_share([(start, end) for _, start, end in spans])}


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Kernel name and time -> kind and fraction of the sum, largest first."""
    sums: Counter[str] = Counter()
    for name, time in times:
        sums[kind_of(name)] += time  # type: ignore[assignment]
    total = sum(sums.values()) or 1.0
    return {kind: time / total for kind, time in sums.most_common()}


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """The fraction of the time from the first start to the last end that no span covers."""
    ordered = sorted(spans)
    if not ordered:
        return 1.0
    busy, reached = 0.0, ordered[0][0]
    # Kernels of several streams may overlap: their union is counted, not their sum.
    for start, end in ordered:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1.0 - busy / max(reached - ordered[0][0], 1e-12)
