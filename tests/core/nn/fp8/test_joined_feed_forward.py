"""A gated feed-forward in FP8 whose activation is computed where it is cast, interpreted: the bits, and the scales of
later steps, of separate kernels for the activation and the casts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.core.nn.fp8.test_cast_implementations import Traffic, uncounted_product
from tests.core.nn.kernels.interpreter import implementation, run_interpreted

from mt_core.config.schema import PrecisionConfig
from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.fp8.feed_forward import join_activations
from mt_core.nn.fp8.history import AdvanceHistories
from mt_core.nn.fp8.multiply import Fp8Multiply
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext

BYTES = {"tensorwise": (34, 26), "delayed": (28, 16), "rowwise": (34, 26), "blockwise": (34, 26)}
"""For each number of the activation, by separate kernels and joined. Forward the activation is not written and read in
16 bits (delayed: 4 bytes; tensorwise, whose largest magnitude takes its own pass: 2; rowwise and blockwise, which
compute it for each product: 2); backward the two halves of its input's gradient are not (8; 6; 6)."""
SIZES = {"tensorwise": 32, "delayed": 32, "rowwise": 32, "blockwise": 128}
"""Features: blocks are not smaller, and the interpreter is slow."""
ROWS = 21  # which fill neither a tile nor what a product is padded to
PADDED = (32, 128)


@dataclass(frozen=True)
class Shape:
    activation: str
    hidden_size: int
    ffn_size: int
    add_bias_linear: bool = False
    init_method_std: float = 0.3
    output_init_std: float = 0.3


def feed_forward(recipe: str, name: str, *, joined: bool, device: str = "cpu", widths: int = 1) -> DenseFeedForward:
    """widths: hidden features, in those of the activation."""
    ctx = ParallelContext(params_dtype=torch.bfloat16)
    module = DenseFeedForward(Shape(name, widths * SIZES[recipe], SIZES[recipe]), ctx)
    options = Fp8Options(
        PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe), "emulated", 1, implementation("fp8_cast", "triton")()
    )
    for layer in (module.linear_fc1, module.linear_fc2):
        history = options.history(ctx) if recipe == "delayed" else None
        if history is not None:
            layer.add_module("fp8", history)
        layer.multiply = Fp8Multiply(options.scaling(history), uncounted_product, layer.cut)
    initialize(module, 3, ctx)
    module.activate = partial(implementation("activation", "triton"), bias=None, name=name)
    if joined:
        join_activations(module, Kernels({"fp8_cast": "triton", "activation": "triton"}, device, "bfloat16"))
        assert module.joined is not None
    return module.to(device)


class ActivationTraffic(Traffic):
    """Of bytes those of the activation [R, F], of its input and of that one's gradient [R, 2F], without rows of
    padding. Nothing else may have as many elements."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.elements = {rows * n: ROWS * n for rows in (ROWS, *PADDED) for n in (features, 2 * features)}

    def count(self, tensors: Iterable[Any]) -> None:
        self.launches += 1
        memory = {x.data_ptr(): x for x in tensors if isinstance(x, torch.Tensor)}
        self.bytes += sum(self.elements.get(x.numel(), 0) * x.itemsize for x in memory.values())


@contextmanager
def traffic_of_kernels(features: int) -> Iterator[Traffic]:
    from triton.runtime import interpreter

    traffic, launch = ActivationTraffic(features), interpreter.GridExecutor.__call__

    def counting(self: Any, *given: Any, **named: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            traffic.count(given)
            launch(self, *given, **named)

    interpreter.GridExecutor.__call__ = counting
    try:
        with traffic:
            yield traffic
    finally:
        interpreter.GridExecutor.__call__ = launch


def use_small_tiles() -> None:
    """The interpreter computes what is masked too."""
    from mt_core.nn.kernels.triton_kernels import fp8_activations, fp8_casts

    for module in (fp8_activations, fp8_casts):
        module._AMAX_BLOCK = 256
        module._ROW_TILES = {False: (16, 64), True: (64, 16)}


def steps(module: DenseFeedForward) -> tuple[list[torch.Tensor], Traffic]:
    """With a history two, the second of which is scaled by it."""
    generator = torch.Generator().manual_seed(1)
    histories = [layer.fp8 for layer in (module.linear_fc1, module.linear_fc2) if hasattr(layer, "fp8")]
    found, (columns, features) = [], module.linear_fc2.weight.shape
    for _ in range(2 if histories else 1):
        x, grad = torch.randn(2, 1, ROWS, columns, generator=generator).bfloat16()
        module.zero_grad()
        x.requires_grad_()
        with traffic_of_kernels(features) as traffic:
            out = module(x)
            out.backward(grad)
        AdvanceHistories(histories, ParallelContext()).after_step()
        trained = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        found += [out.detach(), x.grad, *trained, *(history.amax_history.clone() for history in histories)]
    return found, traffic


def check(rank: int, world: int, recipe: str, name: str) -> tuple[int, tuple[float, ...]]:
    """Launches that are saved, and bytes a number of the activation, separate and joined."""
    use_small_tiles()
    (wanted, before), (found, after) = (
        steps(feed_forward(recipe, name, joined=joined, widths=3)) for joined in (False, True)
    )
    assert len(wanted) == len(found) >= 4
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)
    return before.launches - after.launches, tuple(t.bytes / (ROWS * SIZES[recipe]) for t in (before, after))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SIZES)
def test_the_same_bits_in_fewer_launches_and_bytes(recipe: str) -> None:
    name = "clamped_swiglu" if recipe == "delayed" else "swiglu"
    assert run_interpreted(check, recipe, name) == [(2, BYTES[recipe])]


def split_backward(rank: int, world: int) -> int:
    """One backward pass for the input, then one for the weights, as schedules of pipelines split it."""
    use_small_tiles()
    x, grad = torch.randn(2, 1, ROWS, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    module = feed_forward("tensorwise", "swiglu", joined=True)
    weights = (module.linear_fc1.weight, module.linear_fc2.weight)
    whole = torch.autograd.grad(module(x.requires_grad_()), (x, *weights), grad)
    out = module(x)
    products: list[None] = []

    def counted_product(*given: Any, **named: Any) -> torch.Tensor:
        products.append(None)
        return uncounted_product(*given, **named)

    for layer in (module.joined.first, module.joined.second):
        object.__setattr__(layer, "product", counted_product)
    (dx,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    halves = (dx, *torch.autograd.grad(out, weights, grad))
    for one, other in zip(whole, halves, strict=True):
        assert torch.equal(one, other)
    return len(products)


@pytest.mark.slow
def test_a_split_backward_pass_repeats_no_product() -> None:
    assert run_interpreted(split_backward) == [4]


def repeated_backward(rank: int, world: int) -> None:
    """Passes through one graph: for x with two gradients, then for a weight after a gradient changed in place."""
    use_small_tiles()
    x, first, second = torch.randn(3, 1, 5, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    module = feed_forward("tensorwise", "swiglu", joined=True)
    weight = module.linear_fc1.weight
    wanted = torch.autograd.grad(module(x.requires_grad_()), (x, weight), second)
    out = module(x)
    torch.autograd.grad(out, x, first, retain_graph=True)
    assert torch.equal(torch.autograd.grad(out, x, second, retain_graph=True)[0], wanted[0])
    torch.autograd.grad(out, x, first, retain_graph=True)
    assert torch.equal(torch.autograd.grad(out, weight, first.copy_(second))[0], wanted[1])


@pytest.mark.slow
def test_passes_with_two_gradients_through_one_graph_share_no_product() -> None:
    run_interpreted(repeated_backward)
