"""Every implementation of every kernel, beside torch.compile of the reference and the roofline of the machine.

All are timed in one process, alternating between implementations, as medians. The floor of a kernel is the time to
move its bytes at the copy bandwidth, or to compute its FLOPs at the rate of a large GEMM, both measured in the same
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
from mt_tools.bench.device_timing import medians
from mt_tools.bench.kernel_cases import CASES, SMALL, KernelCase, Sizes
from mt_tools.bench.machine import Machine
from mt_tools.bench.report import Case

ROTATED_BYTES = 2.0**30
"""Bytes that the calls of one measurement move at least."""


def measure_kernels(machine: Machine, only: Collection[str], rounds: int, *, compiled: bool) -> Iterator[Case]:
    """only: names of kernels, empty for all. Raises ConfigError for an unknown one."""
    unknown = sorted(set(only) - set(KERNELS))
    if unknown:
        raise ConfigError(f"--only {', '.join(unknown)}: no such kernel; there are {', '.join(KERNELS)}")
    sizes = Sizes() if machine.is_gpu else SMALL
    for make in CASES:
        for index, case in enumerate(make(machine, sizes)):
            if not only or case.kernel in only:
                # The same case on other memory: calls in turn find nothing of their inputs in the cache.
                again = (nth_case(make, index, machine, sizes) for _ in range(buffer_sets(case, machine) - 1))
                yield measure([case, *again], machine, rounds, compiled=compiled)


def buffer_sets(case: KernelCase, machine: Machine) -> int:
    """How many sets of a case's buffers are used in turn: enough to exceed the L2 cache many times."""
    moved = min(x for x in (case.forward_bytes, case.step_bytes, ROTATED_BYTES) if x) if machine.is_gpu else 0.0
    # Products reuse what they read, so that the cache does not matter to them.
    return 1 if case.step_flops or not moved else math.ceil(ROTATED_BYTES / moved)


def nth_case(
    make: Callable[[Machine, Sizes], Iterator[KernelCase]], index: int, machine: Machine, sizes: Sizes
) -> KernelCase:
    """The same case on new buffers."""
    return next(islice(make(machine, sizes), index, None))


def measure(cases: Sequence[KernelCase], machine: Machine, rounds: int, *, compiled: bool) -> Case:
    """cases: one case, on several sets of buffers."""
    case = cases[0]
    functions, refused = functions_for(case, machine, compiled=compiled)
    name = " ".join([case.kernel, case.label, *case.features])
    result: Case = {"name": name, "cannot": refused, "buffer_sets": len(cases)}
    forwards = [torch.no_grad()(each.forward) for each in cases if each.forward is not None]
    if forwards:
        calls = {n: [partial(forward, f) for forward in forwards] for n, f in functions.items()}
        floor = case.forward_bytes / machine.copy_bandwidth
        result["forward"] = rows(medians(calls, machine.device, rounds), floor)
    steps = {n: [partial(each.step, f) for each in cases] for n, f in functions.items()}
    floor = case.step_flops / machine.gemm_rate or case.step_bytes / machine.copy_bandwidth  # one of the two is 0
    result["step"] = rows(medians(steps, machine.device, rounds), floor)
    if case.memory and machine.is_gpu:
        result["peak_mb"] = {n: peak_megabytes(several[0]) for n, several in steps.items()}
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
    if kernel == "fp8_cast":
        casts = CompiledCasts(
            *(torch.compile(f) for f in (reference().amaxes, reference().by_amaxes, reference().by_past))
        )
        # KERNELS has classes for these two; the case calls what it is given to get an instance.
        return lambda: casts
    return torch.compile(PLAIN_LOSSES.get(kernel, reference))


@dataclass(frozen=True)
class CompiledUpdate:
    """The `TorchAdamW` update of a training step, as one graph."""

    step: Callable[..., None]


@dataclass(frozen=True)
class CompiledCasts:
    """The casts of `TorchCasts`, each as one graph."""

    amaxes: Callable[..., Any]
    by_amaxes: Callable[..., Any]
    by_past: Callable[..., Any]


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
