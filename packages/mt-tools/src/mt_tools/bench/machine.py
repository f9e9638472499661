"""Limits of the machine: GEMM rate, copy bandwidth, launch overhead, disk. Floors of all other benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mt_tools.bench.device_timing import medians
from mt_tools.bench.report import Case

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float32,)
"""On a CPU without 16-bit instructions a 16-bit GEMM is about a hundred times slower."""
LAUNCHES = 200


@dataclass(frozen=True)
class Machine:
    """copy_bandwidth: bytes read and written per second. gemm_rate: FLOP/s in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    copy_bandwidth: float
    gemm_rate: float

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "cpu"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def conditions(self) -> dict[str, object]:
        return {
            "device": self.name,
            "torch_threads": torch.get_num_threads(),
            "dtype": self.dtype_name,
            "copy_gb_per_s": self.copy_bandwidth / 1e9,
            "gemm_tflops": self.gemm_rate / 1e12,
            "small_sizes": not self.is_gpu,
        }


def measure_machine(rounds: int) -> Machine:
    """The GPU in bf16 if there is one, else the CPU in fp32 with sizes for a short run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Machine(device, dtype, copy_bandwidth(device, rounds), gemm_rate(device, dtype, rounds))


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes read and written per second, by a copy too large for the caches (64 MiB on a CPU)."""
    source = torch.ones((2048 if device.type == "cuda" else 64) * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / medians({"copy": [lambda: target.copy_(source)]}, device, rounds)["copy"]


def gemm_rate(device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    """FLOP/s of a square GEMM of random numbers (zeros draw less power, and run faster)."""
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / medians({"product": [lambda: a @ b]}, device, rounds)["product"]


def launch_seconds(device: torch.device, rounds: int) -> float:
    """Seconds per launch of one operator on an empty tensor, launched many times in a row."""
    empty = torch.empty(0, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            empty.add_(1)

    # The host's time is measured: on a GPU, medians would leave it out.
    return medians({"launches": [launches]}, torch.device("cpu"), rounds)["launches"] / LAUNCHES


def disk_rates(megabytes: int = 64) -> tuple[float, float]:
    """(written, read) bytes per second: written to the disk, read from the page cache."""
    data = os.urandom(2**20)
    with TemporaryDirectory(prefix="mt-bench-") as folder:
        path = Path(folder) / "data"
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(data)
            file.flush()
            # Without it the page cache is measured.
            os.fsync(file.fileno())
        written = time.perf_counter() - started
        started = time.perf_counter()
        path.read_bytes()
        return megabytes * 2**20 / written, megabytes * 2**20 / (time.perf_counter() - started)


def calibration_cases(rounds: int) -> Iterator[Case]:
    """One case per quantity; higher is better, except for the launch overhead."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in GPU_DTYPES if device.type == "cuda" else CPU_DTYPES:
        name = str(dtype).removeprefix("torch.")
        yield {"name": f"product {name}", "tflops": gemm_rate(device, dtype, rounds) / 1e12}
    yield {"name": "copy", "gb_per_s": copy_bandwidth(device, rounds) / 1e9}
    if device.type == "cuda":
        yield {"name": "copy on the host", "gb_per_s": copy_bandwidth(torch.device("cpu"), rounds) / 1e9}
    yield {"name": "launch", "microseconds": launch_seconds(device, rounds) * 1e6}
    written, read = disk_rates()
    yield {"name": "disk, written and synced", "gb_per_s": written / 1e9}
    yield {"name": "disk, read from its cache", "gb_per_s": read / 1e9}
