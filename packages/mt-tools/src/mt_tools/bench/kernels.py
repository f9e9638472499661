"""Every implementation of every kernel, beside torch.compile of the reference and the roofline of the machine.

All are timed in one process, alternating between implementations, as medians. The floor of a kernel is the time to
move its bytes at the copy bandwidth, or to compute its FLOPs at the rate of a large GEMM, both measured in the same
run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.kernels.catalogue import KERNELS
from mt_core.nn.kernels.choice import refusals
from mt_core.nn.kernels.request import KernelName, KernelRequest
from mt_core.parallel.context import Axis
from mt_tools.bench.kernel_cases import CASES, SMALL, KernelCase, Sizes
from mt_tools.bench.machine import Machine
from mt_tools.bench.report import Case
from mt_tools.bench.timing import medians


def measure_kernels(machine: Machine, only: Collection[str], rounds: int, *, compiled: bool) -> Iterator[Case]:
    """only: names of kernels, empty for all. Raises ConfigError for an unknown one."""
    unknown = sorted(set(only) - set(KERNELS))
    if unknown:
        raise ConfigError(f"--only {', '.join(unknown)}: no such kernel; there are {', '.join(KERNELS)}")
    sizes = Sizes() if machine.is_gpu else SMALL
    for make in CASES:
        for case in make(machine, sizes):
            if not only or case.kernel in only:
                yield measure(case, machine, rounds, compiled=compiled)


def measure(case: KernelCase, machine: Machine, rounds: int, *, compiled: bool) -> Case:
    functions, refused = functions_for(case, machine, compiled=compiled)
    name = " ".join([case.kernel, case.label, *case.features])
    result: Case = {"name": name, "cannot": refused}
    if case.forward is not None:
        forward = torch.no_grad()(case.forward)
        taken = medians({n: partial(forward, f) for n, f in functions.items()}, machine.device, rounds)
        result["forward"] = rows(taken, case.forward_bytes / machine.copy_bandwidth)
    steps = {name: partial(case.step, function) for name, function in functions.items()}
    floor = case.step_flops / machine.gemm_rate or case.step_bytes / machine.copy_bandwidth
    result["step"] = rows(medians(steps, machine.device, rounds), floor)
    if case.memory and machine.is_gpu:
        result["peak_mb"] = {name: peak_megabytes(step) for name, step in steps.items()}
    return result


def functions_for(
    case: KernelCase, machine: Machine, *, compiled: bool
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """(implementations that can run, reasons why the others cannot)"""
    request = KernelRequest(
        device_type=machine.device.type,
        dtype=machine.dtype_name,
        width=case.width,
        features=frozenset(case.features),
    )
    refused = refusals(case.kernel, request)
    able = {i.name: i.function.load() for i in KERNELS[case.kernel] if i.name not in refused}
    if compiled:
        able["torch.compile"] = compiled_for(case.kernel, able["torch"])
    return able, refused


def compiled_for(kernel: KernelName, reference: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of torch's implementation. A loss has a backward pass that the compiler does not trace, so there it
    is the formula in plain torch."""
    if kernel == "adamw":
        update = CompiledUpdate(torch.compile(reference().step))
        return lambda: update
    return torch.compile(PLAIN_LOSSES.get(kernel, reference))


@dataclass(frozen=True)
class CompiledUpdate:
    """The `TorchAdamW` update of a training step, as one graph."""

    step: Callable[..., None]


def plain_cross_entropy(logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool = False) -> Tensor:
    """[T, V], [T] -> [T] in fp32. axis and overwrite are part of the kernel's interface; here they have no effect."""
    return F.cross_entropy(logits.float(), columns, reduction="none")


def plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis) -> Tensor:
    """Materializes all logits."""
    return plain_cross_entropy(F.linear(hidden, weight), columns, axis)


def plain_linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, columns: Tensor, loss_weights: Tensor, axis: Axis
) -> tuple[Tensor, Tensor]:
    losses = plain_linear_cross_entropy(hidden, weight, columns, axis)
    return losses @ loss_weights, losses.detach()


PLAIN_LOSSES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "cross_entropy": plain_cross_entropy,
        "linear_cross_entropy": plain_linear_cross_entropy,
        "linear_cross_entropy_sum": plain_linear_cross_entropy_sum,
    }
)


def peak_megabytes(call: Callable[[], object]) -> float:
    """Peak memory of the GPU above what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rows(taken: dict[str, float], floor: float) -> dict[str, dict[str, float]]:
    return {
        name: {"ms": value * 1e3, "percent_of_floor": 100 * floor / value, "against_torch": taken["torch"] / value}
        for name, value in taken.items()
    }
