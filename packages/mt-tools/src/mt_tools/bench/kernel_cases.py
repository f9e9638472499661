"""Kernel benchmarks with the shapes of an 8B model: the call, and the bytes it moves or its FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.adamw import AdamWOptions, AdamWTensors, split_halves
from mt_core.nn.kernels.reference.fp8_casts import E4M3, Casts
from mt_core.nn.kernels.reference.hyper_connection import Connection
from mt_core.nn.kernels.request import Feature, KernelName
from mt_core.parallel.context import Axis
from mt_tools.bench.machine import Machine

Call = Callable[[Callable[..., Any]], object]
"""Builds the timed call from the implementation's function."""


@dataclass(frozen=True)
class KernelCase:
    """forward and step (forward and backward, or the whole update): bytes that have to move, or FLOPs."""

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


@dataclass
class Sizes:
    """Sizes of an 8B model on a GPU; on a CPU small enough for a second on a laptop."""

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
    """Forward and backward with a gradient of ones; gradients are dropped, not accumulated."""

    def step(function: Callable[..., Any]) -> None:
        out = call(function)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def norm_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    x, weight, bias = (random(machine, *s) for s in ((sizes.tokens, sizes.hidden), (sizes.hidden,), (sizes.hidden,)))
    size = x.numel() * x.element_size()
    label = f"{sizes.tokens} x {sizes.hidden}"

    def rms(function: Callable[..., Any]) -> Tensor:
        return function(x, weight, 1e-5)

    def layer(function: Callable[..., Any]) -> Tensor:
        return function(x, weight, bias, 1e-5)

    # Forward reads x and writes y: 2. Backward reads dy and x and writes dx: 3 more.
    yield KernelCase("rms_norm", label, sizes.hidden, rms, differentiated(rms, x, weight), 2 * size, 5 * size)
    yield KernelCase(
        "layer_norm", label, sizes.hidden, layer, differentiated(layer, x, weight, bias), 2 * size, 5 * size
    )


def rotary_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
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
        # The step's own concatenation, the gradient of ones and its split move the same number of bytes again.
        yield KernelCase("rotary", label, sizes.head_dim, forward, step, moved, 3.5 * moved, features=features)


def activation_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    for name in ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"):
        halves = 1 if name == "squared_relu" else 2
        x = random(machine, sizes.tokens, halves * sizes.ffn)

        def call(function: Callable[..., Any], x: Tensor = x, name: str = name) -> Tensor:
            return function(x, None, name)

        out = x.numel() // halves * x.element_size()
        yield KernelCase(
            "activation", f"{name} {sizes.tokens} x {sizes.ffn}", sizes.ffn, call, differentiated(call, x),
            # Forward: x in, y out. Backward: dy and x in, dx out.
            (halves + 1) * out, (3 * halves + 2) * out, features=(name,),
        )  # fmt: skip


def residual_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    x, residual = (random(machine, sizes.tokens, sizes.hidden) for _ in range(2))
    bias = random(machine, sizes.hidden)
    size = x.numel() * x.element_size()

    def call(function: Callable[..., Any]) -> Tensor:
        return function(x, bias, residual, 0.1)

    step = differentiated(call, x, bias, residual)
    label = f"{sizes.tokens} x {sizes.hidden}"
    # Forward: x and residual in, y out. Backward: dy in, dx out; the residual's gradient is dy. The sum over rows for
    # the bias reads dx.
    yield KernelCase(
        "bias_dropout_add", label, sizes.hidden, call, step, 3 * size, 6 * size, features=("bias", "dropout")
    )


def convolution_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    """Queries, keys and values of a gated delta net, which are as wide as two streams."""
    width, taps = 2 * sizes.hidden, 4
    x, weight = random(machine, 1, sizes.tokens, width), random(machine, width, taps)
    size = x.numel() * x.element_size()

    def call(function: Callable[..., Any]) -> Tensor:
        return function(x, weight, None, silu=True)

    # Forward: x in, y out. Backward: x and dy in, dx out.
    label = f"{sizes.tokens} x {width}, {taps} taps"
    yield KernelCase("causal_conv", label, taps, call, differentiated(call, x, weight), 2 * size, 5 * size)


def index_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    """Scores of an indexer with 64 heads of 128 channels, for as many keys as queries."""
    heads, channels = 64, 128
    queries, keys = random(machine, 1, sizes.tokens, heads, channels), random(machine, 1, sizes.tokens, channels)
    weights = random(machine, 1, sizes.tokens, heads)
    inputs, outputs = sum(x.numel() * x.element_size() for x in (queries, keys, weights)), 4 * sizes.tokens**2

    def call(function: Callable[..., Any]) -> Tensor:
        return function(queries, weights, keys)

    # Forward: queries, keys and weights in, scores out. Backward: the same and the gradient of scores in, theirs out.
    step = differentiated(call, queries, weights, keys)
    label = f"{sizes.tokens} x {heads} x {channels}"
    yield KernelCase("index_scores", label, channels, call, step, inputs + outputs, 3 * inputs + 2 * outputs)


def connection_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    """What the connection of a block reads from four streams, with 20 iterations of Sinkhorn (DeepSeek-V4)."""
    n, tokens = 4, sizes.tokens
    streams = random(machine, 1, tokens, n * sizes.hidden)
    shapes = (1, tokens, (2 + n) * n), ((2 + n) * n,), (3,)
    leaves = [random(machine, *shape).detach().float().requires_grad_() for shape in shapes]
    size = streams.numel() * streams.element_size()

    def call(function: Callable[..., Any]) -> Tensor:
        return function(streams, *leaves, Connection(1e-6, 1e-6, 20))[0]

    # Forward: streams in, a quarter of them out. Backward: both in, streams out.
    label = f"{tokens} x {n} x {sizes.hidden}"
    step = differentiated(call, streams, *leaves)
    yield KernelCase("hyper_connection", label, n, call, step, size + size // n, 3 * size + 2 * size // n)


def softmax_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    scores = random(machine, *sizes.scores)
    size = scores.numel() * scores.element_size()

    def call(function: Callable[..., Any]) -> Tensor:
        return function(scores, 0.1, None, True)

    label = " x ".join(str(size) for size in sizes.scores)
    step = differentiated(call, scores)
    yield KernelCase("softmax", label, sizes.scores[-1], call, step, 2 * size, 5 * size, features=("causal",))


def loss_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    hidden, weight = random(machine, sizes.tokens, sizes.hidden), random(machine, sizes.vocabulary, sizes.hidden)
    columns = torch.randint(0, sizes.vocabulary, (sizes.tokens,), device=machine.device)
    factor = torch.full((sizes.tokens,), 1 / sizes.tokens, device=machine.device)
    label = f"{sizes.tokens} x {sizes.vocabulary}"
    for dtype in dict.fromkeys((torch.float32, machine.dtype)):
        logits = torch.randn(sizes.tokens, sizes.vocabulary, device=machine.device, dtype=dtype)
        size = logits.numel() * logits.element_size()

        def entropy(function: Callable[..., Any], logits: Tensor = logits) -> object:
            return function(logits, columns, Axis())

        def entropy_step(function: Callable[..., Any], logits: Tensor = logits) -> None:
            # Overwriting the logits changes the memory, not the time: that does not depend on their values.
            leaf = logits.detach().requires_grad_()
            torch.autograd.grad(function(leaf, columns, Axis(), True), leaf, factor)

        name = str(dtype).removeprefix("torch.")
        yield KernelCase(
            "cross_entropy",
            f"{label} {name}",
            sizes.vocabulary,
            entropy,
            entropy_step,
            size,
            3 * size,
            memory=True,
        )
        # The next dtype's logits are as large: 2 GB in bf16, 4 GB in fp32.
        del logits

    def linear(function: Callable[..., Any]) -> None:
        torch.autograd.grad(function(hidden, weight, columns, Axis()), (hidden, weight), factor)

    def linear_sum(function: Callable[..., Any]) -> None:
        torch.autograd.grad(function(hidden, weight, columns, factor, Axis())[0], (hidden, weight))

    # Three products: logits, dhidden, dweight. A form that computes the logits again does more than it is credited
    # with.
    flops = 6.0 * sizes.tokens * sizes.hidden * sizes.vocabulary
    shape = f"{sizes.tokens} x {sizes.hidden} x {sizes.vocabulary}"
    width = sizes.vocabulary
    yield KernelCase("linear_cross_entropy", shape, width, None, linear, step_flops=flops, memory=True)
    yield KernelCase("linear_cross_entropy_sum", shape, width, None, linear_sum, step_flops=flops, memory=True)


def adamw_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    options = AdamWOptions(1e-4, 0.9, 0.95, 1e-8, 0.1)
    scale = torch.ones((), device=machine.device)
    count = sum(sizes.parameters)
    for label, moment, gradient, in_halves, cost in (
        # Bytes of an element: weight, moments and gradient read; weight, moments and copy written.
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
        # Only the lists that the update takes are kept in memory.
        del main, halves
        engines: dict[Any, Any] = {}

        def step(
            engine: Callable[..., Any], tensors: AdamWTensors = tensors, engines: dict[Any, Any] = engines
        ) -> None:
            # One engine for all calls: its tables of addresses are built once, as in training.
            engines.setdefault(engine, engine()).step(tensors, options, scale)

        features: tuple[Feature, ...] = ("remainders", "moments_16bit") if in_halves else ()
        yield KernelCase(
            "adamw", f"{count / 1e6:.1f} M, {label}", 0, None, step, step_bytes=cost * count, features=features
        )


def fp8_cases(machine: Machine, sizes: Sizes) -> Iterator[KernelCase]:
    """A matrix and its transpose by its own magnitude, and by one of the past."""
    x = random(machine, sizes.tokens, sizes.hidden).detach()
    past, noted = torch.full((), 5.0, device=machine.device), torch.zeros((), device=machine.device)

    def current(casts: Callable[[], Casts]) -> None:
        casts().by_amaxes(x, casts().amaxes(x), E4M3, 0, "both").along_rows()

    def delayed(casts: Callable[[], Casts]) -> None:
        casts().by_past(x, past, noted, E4M3, 0, "both").along_rows()

    size, item = x.numel(), x.element_size()
    label = f"{sizes.tokens} x {sizes.hidden}"
    # Read x (twice to find its magnitude first), write it and its transpose in a byte each.
    for name, step, moved in (("tensorwise", current, 2 * item + 2), ("delayed", delayed, item + 2)):
        yield KernelCase("fp8_cast", f"{name} {label}", sizes.hidden, None, step, step_bytes=float(moved * size))


CASES = (
    norm_cases,
    rotary_cases,
    activation_cases,
    residual_cases,
    convolution_cases,
    index_cases,
    connection_cases,
    softmax_cases,
    loss_cases,
    adamw_cases,
    fp8_cases,
)
