"""A gated feed-forward in FP8 whose activation is computed where it is cast, interpreted: the bits, and the scales of
later steps, of separate kernels for the activation and the casts."""

from __future__ import annotations

from collections.abc import Iterator
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

RECIPES = {
    # launches, and bytes for each number of a matrix: apart, joined
    "tensorwise": [(16, 70), (14, 62)],
    "delayed": [(16, 54), (14, 42)],
    "rowwise": [(14, 64), (12, 56)],
    "blockwise": [(14, 64), (12, 56)],
}


@dataclass(frozen=True)
class Shape:
    activation: str
    hidden_size: int = 128
    ffn_size: int = 128
    add_bias_linear: bool = False
    init_method_std: float = 0.3
    output_init_std: float = 0.3


def feed_forward(recipe: str, name: str, *, joined: bool) -> DenseFeedForward:
    ctx = ParallelContext(params_dtype=torch.bfloat16)
    module = DenseFeedForward(Shape(name), ctx)
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
        join_activations(module, Kernels({"fp8_cast": "triton", "activation": "triton"}, "cpu", "bfloat16"))
        assert module.joined is not None
    return module


@contextmanager
def traffic_of_kernels() -> Iterator[Traffic]:
    from triton.runtime import interpreter

    traffic, launch = Traffic(), interpreter.GridExecutor.__call__

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


def steps(module: DenseFeedForward, rows: int) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Two: the second of delayed scaling has a history."""
    generator = torch.Generator().manual_seed(rows)
    histories = [layer.fp8 for layer in (module.linear_fc1, module.linear_fc2) if hasattr(layer, "fp8")]
    found = []
    for _ in range(2):
        x, grad = torch.randn(2, 1, rows, 128, generator=generator).bfloat16()
        module.zero_grad()
        x.requires_grad_()
        with traffic_of_kernels() as traffic:
            out = module(x)
            out.backward(grad)
        AdvanceHistories(histories, ParallelContext()).after_step()
        trained = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        found += [out.detach(), x.grad, *trained, *(history.amax_history.clone() for history in histories)]
    return found, (traffic.launches, round(traffic.bytes / (rows * 128)))


def check(rank: int, world: int, recipe: str, name: str, rows: int) -> list[tuple[int, int]]:
    apart, joined = (steps(feed_forward(recipe, name, joined=joined), rows) for joined in (False, True))
    assert len(apart[0]) == len(joined[0]) >= 8
    for one, other in zip(apart[0], joined[0], strict=True):
        assert torch.equal(one, other)
    return [apart[1], joined[1]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_in_fewer_launches_and_bytes(recipe: str) -> None:
    assert run_interpreted(check, recipe, "swiglu", 128) == [RECIPES[recipe]]


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise"])
def test_rows_that_fill_no_tile(recipe: str) -> None:
    run_interpreted(check, recipe, "clamped_swiglu", 21)
