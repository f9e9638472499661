"""Timing of a GPU, on a simulated one: what of the host's time and of the cache gets into a measurement."""

from __future__ import annotations

import torch

from mt_tools.bench import device_timing
from mt_tools.bench.device_timing import device_seconds
from mt_tools.bench.kernel_cases import KernelCase
from mt_tools.bench.kernels import ROTATED_BYTES, buffer_sets
from mt_tools.bench.machine import Machine

LAUNCH, COLD, WARM = 60e-6, 31e-6, 5e-6
"""Seconds of the host for a launch, and of the device for a kernel whose inputs are in memory or in the cache."""


class SimulatedQueue:
    """A host that launches on a device: each has a clock, and the device starts nothing before it is launched."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.cached: int | None = None

    def launch(self, buffers: int) -> None:
        self.host += LAUNCH
        self._execute(WARM if buffers == self.cached else COLD)
        self.cached = buffers

    def _execute(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def drain(self) -> None:
        self.host = max(self.host, self.device)

    def flush_cache(self) -> None:
        self._execute(COLD)
        self.cached = None

    def hold(self, seconds: float) -> None:
        self._execute(seconds)

    def mark(self) -> float:
        self._execute(0.0)
        return self.device

    def between(self, first: float, last: float) -> float:
        return last - first


def test_a_measurement_has_neither_launches_nor_cached_inputs(monkeypatch) -> None:
    queue = SimulatedQueue()

    def host_seconds(call) -> float:
        before = queue.host
        call()
        return queue.host - before

    monkeypatch.setattr(device_timing, "elapsed", host_seconds)
    for sets in (1, 2, 8):
        calls = [lambda number=number: queue.launch(number) for number in range(sets)]
        assert abs(device_seconds(queue, calls) - COLD) < 1e-9


def test_results_of_a_measurement_are_held_until_its_end(monkeypatch) -> None:
    """So that the allocator gives each call other memory."""
    addresses: list[int] = []

    def call() -> torch.Tensor:
        made = torch.empty(1 << 16)
        addresses.append(made.data_ptr())
        return made

    device_seconds(SimulatedQueue(), [call] * 4)
    assert len(set(addresses[-4:])) == 4


def test_small_cases_are_repeated_on_other_buffers() -> None:
    gpu = Machine(torch.device("cuda"), torch.bfloat16, 1e12, 1e15)
    case = KernelCase("rms_norm", "", 4096, None, lambda f: None, forward_bytes=2.0**27, step_bytes=5 * 2.0**26)
    assert buffer_sets(case, gpu) * case.forward_bytes == ROTATED_BYTES
    assert buffer_sets(KernelCase("adamw", "", 0, None, case.step, step_bytes=2.0**34), gpu) == 1
    products = KernelCase("linear_cross_entropy", "", 4096, None, case.step, step_flops=1e12)
    assert buffer_sets(products, gpu) == 1
