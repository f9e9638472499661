"""Every implementation of every kernel, beside torch.compile of the reference and the floor of the machine.

    uv run python bench/kernels.py [--out kernels.json] [--only rms_norm,rotary] [--rounds 30] [--no-compile]

On a GPU shapes are those of an 8B model in bf16; on CPU they are small and fp32, to rehearse. All is timed in one
process, one call of each implementation in turn, and medians are taken. The floor of a kernel is the time in which
its bytes move at the copy bandwidth, or its products at the rate of a large matrix product, both measured first.
The file is written again after each case, so that a run that is cut keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_core.nn.kernels.catalogue import KERNELS
from mt_core.nn.kernels.choice import refusals
from mt_core.nn.kernels.reference.adamw import AdamWOptions, AdamWTensors, split_halves
from mt_core.nn.kernels.request import Feature, KernelName, KernelRequest
from mt_core.parallel.context import Axis

Call = Callable[[Callable[..., Any]], object]
"""What is timed, given the implementation's function."""


@dataclass(frozen=True)
class Case:
    """forward and step (forward and backward, or the whole update): bytes that have to move, or products to make."""

    kernel: KernelName
    label: str
    width: int
    forward: Call | None
    step: Call
    forward_bytes: float = 0.0
    step_bytes: float = 0.0
    step_flops: float = 0.0
    features: tuple[Feature, ...] = ()
    memory: bool = False


@dataclass(frozen=True)
class Machine:
    device: torch.device
    dtype: torch.dtype
    copy_bandwidth: float
    """Bytes read and written a second."""
    gemm_rate: float
    """Operations a second."""


@dataclass
class Sizes:
    """Of an 8B model on a GPU; what a laptop does in a second on CPU."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    scores: tuple[int, int, int, int] = (1, 8, 4096, 4096)
    parameters: list[int] = field(default_factory=lambda: [4096 * 14336] * 21)


SMALL = Sizes(128, 256, 512, 4, 2, 64, 2048, (1, 2, 128, 128), [256 * 512] * 4)


def random(machine: Machine, *shape: int) -> Tensor:
    return torch.randn(*shape, device=machine.device, dtype=machine.dtype).requires_grad_()


def differentiated(call: Callable[[Callable[..., Any]], Tensor], *inputs: Tensor) -> Call:
    """Forward and backward with a gradient of ones; gradients are dropped, not added up."""

    def step(function: Callable[..., Any]) -> None:
        out = call(function)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def norm_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    x, weight, bias = (random(machine, *s) for s in ((sizes.tokens, sizes.hidden), (sizes.hidden,), (sizes.hidden,)))
    one = x.numel() * x.element_size()
    label = f"{sizes.tokens} x {sizes.hidden}"

    def rms(function: Callable[..., Any]) -> Tensor:
        return function(x, weight, 1e-5)

    def layer(function: Callable[..., Any]) -> Tensor:
        return function(x, weight, bias, 1e-5)

    yield Case("rms_norm", label, sizes.hidden, rms, differentiated(rms, x, weight), 2 * one, 5 * one)
    yield Case("layer_norm", label, sizes.hidden, layer, differentiated(layer, x, weight, bias), 2 * one, 5 * one)


def rotary_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    q = random(machine, 1, sizes.tokens, sizes.heads, sizes.head_dim)
    k = random(machine, 1, sizes.tokens, sizes.groups, sizes.head_dim)
    angles = torch.rand(1, sizes.tokens, 1, sizes.head_dim // 2, device=machine.device)
    cos, sin = angles.cos(), angles.sin()
    moved = 2 * (q.numel() + k.numel()) * q.element_size()
    for features in ((), ("interleaved",)):

        def turn(function: Callable[..., Any], interleaved: bool = bool(features)) -> Tensor:
            turned_q, turned_k = function(q, k, cos, sin, interleaved)
            return torch.cat([turned_q.flatten(), turned_k.flatten()])

        def forward(function: Callable[..., Any], interleaved: bool = bool(features)) -> object:
            return function(q, k, cos, sin, interleaved)

        label = f"{sizes.tokens} x ({sizes.heads} + {sizes.groups}) x {sizes.head_dim}"
        step = differentiated(turn, q, k)
        # The step's own concatenation, gradient of ones and its split move as much again.
        yield Case("rotary", label, sizes.head_dim, forward, step, moved, 3.5 * moved, features=features)


def activation_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    for name in ("swiglu", "geglu", "geglu_tanh", "squared_relu"):
        halves = 1 if name == "squared_relu" else 2
        x = random(machine, sizes.tokens, halves * sizes.ffn)

        def call(function: Callable[..., Any], x: Tensor = x, name: str = name) -> Tensor:
            return function(x, None, name)

        out = x.numel() // halves * x.element_size()
        yield Case(
            "activation", f"{name} {sizes.tokens} x {sizes.ffn}", sizes.ffn, call, differentiated(call, x),
            (halves + 1) * out, (3 * halves + 2) * out, features=(name,),
        )  # fmt: skip


def residual_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    x, residual = (random(machine, sizes.tokens, sizes.hidden) for _ in range(2))
    bias = random(machine, sizes.hidden)
    one = x.numel() * x.element_size()

    def call(function: Callable[..., Any]) -> Tensor:
        return function(x, bias, residual, 0.1)

    step = differentiated(call, x, bias, residual)
    label = f"{sizes.tokens} x {sizes.hidden}"
    yield Case("bias_dropout_add", label, sizes.hidden, call, step, 3 * one, 6 * one, features=("bias", "dropout"))


def softmax_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    scores = random(machine, *sizes.scores)
    one = scores.numel() * scores.element_size()

    def call(function: Callable[..., Any]) -> Tensor:
        return function(scores, 0.1, None, True)

    label = " x ".join(str(size) for size in sizes.scores)
    step = differentiated(call, scores)
    yield Case("softmax", label, sizes.scores[-1], call, step, 2 * one, 5 * one, features=("causal",))


def loss_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    hidden, weight = random(machine, sizes.tokens, sizes.hidden), random(machine, sizes.vocabulary, sizes.hidden)
    columns = torch.randint(0, sizes.vocabulary, (sizes.tokens,), device=machine.device)
    factor = torch.full((sizes.tokens,), 1 / sizes.tokens, device=machine.device)
    label = f"{sizes.tokens} x {sizes.vocabulary}"
    for dtype in dict.fromkeys((torch.float32, machine.dtype)):
        logits = torch.randn(sizes.tokens, sizes.vocabulary, device=machine.device, dtype=dtype)
        one = logits.numel() * logits.element_size()

        def entropy(function: Callable[..., Any], logits: Tensor = logits) -> object:
            return function(logits, columns, Axis())

        def entropy_step(function: Callable[..., Any], logits: Tensor = logits) -> None:
            # The values do not matter to the time; that they are overwritten does to the memory.
            given = logits.detach().requires_grad_()
            torch.autograd.grad(function(given, columns, Axis(), True), given, factor)

        name = str(dtype).removeprefix("torch.")
        yield Case(
            "cross_entropy", f"{label} {name}", sizes.vocabulary, entropy, entropy_step, one, 3 * one, memory=True
        )
        del logits

    def linear(function: Callable[..., Any]) -> None:
        torch.autograd.grad(function(hidden, weight, columns, Axis()), (hidden, weight), factor)

    def linear_sum(function: Callable[..., Any]) -> None:
        torch.autograd.grad(function(hidden, weight, columns, factor, Axis())[0], (hidden, weight))

    flops = 6.0 * sizes.tokens * sizes.hidden * sizes.vocabulary
    shape = f"{sizes.tokens} x {sizes.hidden} x {sizes.vocabulary}"
    width = sizes.vocabulary
    yield Case("linear_cross_entropy", shape, width, None, linear, step_flops=flops, memory=True)
    yield Case("linear_cross_entropy_sum", shape, width, None, linear_sum, step_flops=flops, memory=True)


def adamw_cases(machine: Machine, sizes: Sizes) -> Iterator[Case]:
    options = AdamWOptions(1e-4, 0.9, 0.95, 1e-8, 0.1)
    scale = torch.ones((), device=machine.device)
    count = sum(sizes.parameters)
    for label, moment, gradient, in_halves, cost in (
        ("fp32 with bf16 copy", torch.float32, torch.bfloat16, False, 28),
        ("halves, bf16 moments", torch.bfloat16, torch.bfloat16, True, 18),
    ):
        main = [torch.randn(size, device=machine.device) for size in sizes.parameters]
        halves = [split_halves(x) for x in main] if in_halves else []
        tensors = AdamWTensors(
            [high for high, _ in halves] or main,
            [torch.randn(size, device=machine.device, dtype=gradient) for size in sizes.parameters],
            [torch.zeros(size, device=machine.device, dtype=moment) for size in sizes.parameters],
            [torch.zeros(size, device=machine.device, dtype=moment) for size in sizes.parameters],
            [torch.zeros((), device=machine.device) for _ in sizes.parameters],
            [low for _, low in halves],
            [] if in_halves else [x.to(torch.bfloat16) for x in main],
        )
        del main, halves
        engines: dict[Any, Any] = {}

        def step(
            engine: Callable[..., Any], tensors: AdamWTensors = tensors, engines: dict[Any, Any] = engines
        ) -> None:
            engines.setdefault(engine, engine()).step(tensors, options, scale)

        features: tuple[Feature, ...] = ("remainders", "moments_16bit") if in_halves else ()
        yield Case("adamw", f"{count / 1e6:.1f} M, {label}", 0, None, step, step_bytes=cost * count, features=features)


CASES = (norm_cases, rotary_cases, activation_cases, residual_cases, softmax_cases, loss_cases, adamw_cases)


# -- measuring -------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def medians(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """One of each in turn, so that whatever disturbs the machine disturbs all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(seconds(call, device))
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_machine(rounds: int) -> Machine:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    megabytes, side = (2048, 8192) if device.type == "cuda" else (64, 512)
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    taken = medians({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, device, rounds)
    return Machine(device, dtype, 2 * source.numel() / taken["copy"], 2 * side**3 / taken["product"])


def functions_for(case: Case, machine: Machine, compiled: bool) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """(what can run, why the others cannot)"""
    dtype = str(machine.dtype).removeprefix("torch.")
    request = KernelRequest(
        device_type=machine.device.type, dtype=dtype, width=case.width, features=frozenset(case.features)
    )
    refused = refusals(case.kernel, request)
    able = {i.name: i.function.load() for i in KERNELS[case.kernel] if i.name not in refused}
    if compiled and case.forward is not None and case.kernel != "cross_entropy":
        able["torch.compile"] = torch.compile(able["torch"])
    return able, refused


def peak_megabytes(call: Callable[[], object], device: torch.device) -> float | None:
    """Over what was there before; on a GPU only."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def run_case(case: Case, machine: Machine, rounds: int, compiled: bool) -> dict[str, Any]:
    functions, refused = functions_for(case, machine, compiled)
    result: dict[str, Any] = {"kernel": case.kernel, "shape": case.label, "features": case.features, "cannot": refused}
    if case.forward is not None:
        forward = torch.no_grad()(case.forward)
        taken = medians({n: partial(forward, f) for n, f in functions.items()}, machine.device, rounds)
        result["forward"] = rows(taken, case.forward_bytes / machine.copy_bandwidth)
    steps = {name: partial(case.step, function) for name, function in functions.items()}
    floor = case.step_flops / machine.gemm_rate or case.step_bytes / machine.copy_bandwidth
    result["step"] = rows(medians(steps, machine.device, rounds), floor)
    if case.memory:
        result["peak_mb"] = {name: peak_megabytes(step, machine.device) for name, step in steps.items()}
    return result


def rows(taken: dict[str, float], floor: float) -> dict[str, dict[str, float]]:
    return {
        name: {"ms": value * 1e3, "percent_of_floor": 100 * floor / value, "against_torch": taken["torch"] / value}
        for name, value in taken.items()
    }


def conditions(machine: Machine) -> dict[str, Any]:
    cuda = machine.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(machine.dtype).removeprefix("torch."),
        "copy_gb_per_s": machine.copy_bandwidth / 1e9,
        "gemm_tflops": machine.gemm_rate / 1e12,
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['kernel']}  {result['shape']}  {' '.join(result['features'])}")
    for part in ("forward", "step"):
        for name, row in result.get(part, {}).items():
            print(
                f"  {part:8} {name:14} {row['ms']:10.3f} ms  {row['percent_of_floor']:6.1f} % of the floor  "
                f"{row['against_torch']:6.2f} x torch"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--only", default="", help="kernels, with commas")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    machine = measure_machine(options.rounds)
    sizes = Sizes() if machine.device.type == "cuda" else SMALL
    report: dict[str, Any] = {"conditions": conditions(machine), "cases": []}
    wanted = set(filter(None, options.only.split(",")))
    unknown = wanted - set(KERNELS)
    if unknown:
        parser.error(f"--only: no kernel {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}")
    print(json.dumps(report["conditions"], indent=2))
    for make in CASES:
        for case in make(machine, sizes):
            if wanted and case.kernel not in wanted:
                continue
            result = run_case(case, machine, options.rounds, not options.no_compile)
            report["cases"].append(result)
            options.out.write_text(json.dumps(report, indent=2) + "\n")
            show(result)


if __name__ == "__main__":
    main()
