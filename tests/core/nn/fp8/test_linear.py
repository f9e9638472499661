"""A linear layer in FP8: forward and gradients against fp64, which formats it uses, what it keeps, and hooks on it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from mt_core.config.schema import PrecisionConfig
from mt_core.nn.fp8.history import AdvanceHistories, AmaxHistory
from mt_core.nn.fp8.multiply import Fp8Multiply, emulated_product, torch_product
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.reference.fp8_casts import Scaled
from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.split_backward import backward_of_inputs

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
TOKENS, IN, OUT = (3, 20), 128, 256
HALF_STEP = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""Largest relative rounding of a normal number."""


class Counting:
    """The emulated product, counting the formats that it multiplies."""

    def __init__(self) -> None:
        self.formats: list[tuple[torch.dtype, torch.dtype]] = []

    def __call__(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
        self.formats.append((a.data.dtype, b.data.dtype))
        return emulated_product(a, b, dtype, fast=fast)


def layer(recipe: str, fp8_format: str = "hybrid", product=emulated_product, **keys) -> ColumnParallelLinear:
    ctx = ParallelContext()
    module = ColumnParallelLinear(IN, OUT, ctx, bias=True, init=normal(0.1))
    options = Fp8Options(PrecisionConfig(fp8_format=fp8_format, fp8_recipe=recipe, **keys), "emulated", 1)
    history = options.history(ctx) if recipe == "delayed" else None
    if history is not None:
        module.add_module("fp8", history)
    module.multiply = Fp8Multiply(options.scaling(history), product, module.cut, options.config.fp8_wgrad)
    initialize(module, 3, ctx)
    with torch.no_grad():
        module.bias.copy_(torch.linspace(-1.0, 1.0, OUT))
    return module


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(*TOKENS, IN, generator=generator).requires_grad_()
    return x, torch.randn(*TOKENS, OUT, generator=generator) * 1e-3


def computed(module: ColumnParallelLinear) -> dict[str, Tensor]:
    x, grad = tensors()
    out = module(x)
    out.backward(grad)
    return {"out": out.detach(), "dx": x.grad, "dweight": module.weight.grad, "dbias": module.bias.grad}


def in_fp64(module: ColumnParallelLinear) -> dict[str, Tensor]:
    x, grad = (t.detach().double() for t in tensors())
    weight, bias = module.weight.detach().double(), module.bias.detach().double()
    rows, grad_rows = x.flatten(0, 1), grad.flatten(0, 1)
    return {
        "out": x @ weight.T + bias,
        "dx": grad @ weight,
        "dweight": grad_rows.T @ rows,
        "dbias": grad_rows.sum(0),
    }


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients_are_off_by_no_more_than_the_formats_round(recipe, fp8_format) -> None:
    """Each factor is off by at most half a step, so a product by at most the sum of two (and their product)."""
    module = layer(recipe, fp8_format)
    found, expected = computed(module), in_fp64(module)
    of_gradient = HALF_STEP[torch.float8_e5m2 if fp8_format == "hybrid" else torch.float8_e4m3fn]
    of_input = HALF_STEP[torch.float8_e4m3fn]
    x, grad = (t.detach().double().flatten(0, 1).abs() for t in tensors())
    weight = module.weight.detach().double().abs()
    sums = {"out": x @ weight.T, "dx": grad @ weight, "dweight": grad.T @ x}
    for name, magnitude in sums.items():
        step = of_input if name == "out" else of_gradient
        worst = (1 + step) * (1 + of_input) - 1
        off = (found[name].double() - expected[name]).abs().view_as(magnitude)
        # Numbers below the normal ones of the format are off by half its smallest step.
        assert bool((off <= worst * magnitude * 1.02).all()), (name, (off / magnitude).max())
        assert 1e-3 < ((found[name] - expected[name]).norm() / expected[name].norm()).item() < worst
    assert torch.allclose(found["dbias"].double(), expected["dbias"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recipe", RECIPES)
def test_hybrid_has_gradients_in_e5m2(recipe) -> None:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for fp8_format, of_gradient in (("hybrid", e5m2), ("e4m3", e4m3)):
        counting = Counting()
        computed(layer(recipe, fp8_format, counting))
        assert counting.formats == [(e4m3, e4m3), (of_gradient, e4m3), (of_gradient, e4m3)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_fp8_wgrad_the_weight_gradient_is_that_of_the_format_of_the_weights(recipe) -> None:
    counting = Counting()
    module = layer(recipe, product=counting, fp8_wgrad=False)
    found, expected = computed(module), in_fp64(module)
    assert len(counting.formats) == 2
    assert ((found["dweight"] - expected["dweight"]).norm() / expected["dweight"].norm()).item() < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_margin_leaves_powers_of_two_free(recipe) -> None:
    """Scales by powers of two change nothing but what is lost at the low end: here nothing in e4m3's upper part."""
    plain, free = computed(layer(recipe)), computed(layer(recipe, fp8_margin=1))
    assert ((plain["out"] - free["out"]).norm() / plain["out"].norm()).item() < 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_halves_of_a_split_backward_pass_compute_one_gradient_each(recipe) -> None:
    counting = Counting()
    module = layer(recipe, product=counting)
    whole = computed(layer(recipe))
    x, grad = tensors()
    doubled = x * 2.0  # the way to the input leads through another node, as in a layer
    out = module(doubled / 2.0)
    counting.formats.clear()
    (dx,), weights = backward_of_inputs([get_gradient_edge(out)], [grad], [x])
    assert len(counting.formats) == 1
    assert module.weight.grad is None
    weights()
    assert len(counting.formats) == 2
    assert torch.equal(dx, whole["dx"])
    assert torch.equal(module.weight.grad, whole["dweight"])


def test_one_scale_for_all_keeps_a_byte_an_element() -> None:
    for recipe, size in (("tensorwise", 1), ("delayed", 1), ("rowwise", 4), ("blockwise", 4)):
        kept: Counter[str] = Counter()
        module = layer(recipe)
        x, _ = tensors()

        def pack(tensor: Tensor, module=module, kept=kept) -> Tensor:
            if tensor.data_ptr() != module.weight.data_ptr() and tensor.dim():
                kept["bytes"] += tensor.numel() * tensor.element_size()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        assert kept["bytes"] == size * x.numel()


# -- delayed scaling ----------------------------------------------------------------------------------


def history(length: int = 3, algorithm="most_recent") -> AmaxHistory:
    found = AmaxHistory(length, algorithm, ParallelContext())
    initialize(found, 0, ParallelContext())
    return found


def test_the_history_holds_the_largest_magnitude_of_each_of_the_last_steps() -> None:
    recent, largest = history(), history(algorithm="max")
    for amaxes in ([5.0, 2.0], [1.0], [3.0, 1.0], [2.0]):
        for one in (recent, largest):
            for amax in amaxes:
                one.note("input", torch.tensor(amax))
            AdvanceHistories([one], ParallelContext()).after_step()
    assert recent.amax_history[0].tolist() == [2.0, 3.0, 1.0]
    assert recent.amax_history[1].tolist() == [0.0, 0.0, 0.0]
    assert recent.amax("input") == 2.0
    assert largest.amax("input") == 3.0


def test_scales_follow_the_steps_before_and_stay_for_a_whole_step() -> None:
    module = layer("delayed")
    past: AmaxHistory = module.fp8
    x, grad = tensors()
    module(x).backward(grad)
    first = past.noted.clone()
    expected = [x.detach().abs().max(), module.weight.detach().abs().max(), grad.abs().max()]
    assert first.tolist() == pytest.approx([float(amax) for amax in expected])
    assert bool((past.amax_history == -1.0).all())
    AdvanceHistories([past], ParallelContext()).after_step()
    assert torch.equal(past.amax_history[:, 0], first)
    # Twice the input at the scale of the last step: what is beyond the largest number becomes that.
    out = module(2.0 * x.detach())
    limit = float(first[0])
    clipped = (2.0 * x.detach()).clamp(-limit, limit)
    error = (out.detach() - clipped @ module.weight.detach().T - module.bias.detach()).norm() / out.detach().norm()
    assert error.item() < 0.05
    assert float(past.noted[0]) == pytest.approx(2.0 * limit)


def test_passes_without_gradients_are_not_noted() -> None:
    module = layer("delayed")
    with torch.no_grad():
        module(tensors()[0])
    assert not module.fp8.noted.any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(recipe, bad) -> None:
    """A saturating cast alone would turn infinity into the largest number."""
    module = layer(recipe)
    if recipe == "delayed":
        x, grad = tensors()
        module(x).backward(grad)
        AdvanceHistories([module.fp8], ParallelContext()).after_step()
    x = tensors()[0].detach()
    x[1, 2, 3] = bad
    assert not bool(module(x)[1, 2].isfinite().any())
    if recipe == "delayed":
        assert bool(module.fp8.noted.isfinite().all())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compilation_has_one_graph_for_each_pass(recipe) -> None:
    """With the products of a GPU, on the meta device, without generating code. The compiler is reached with operators
    alone: the same function of torch.nn.functional does not trace in torch 2.11."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    products: list[int] = []

    def record(graph, inputs):
        products.append(sum("scaled_mm" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    module = layer(recipe, product=torch_product).to("meta")
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    out = compiled(torch.randn(2, 64, IN, device="meta", requires_grad=True))
    out.backward(torch.ones_like(out))
    assert products == [1, 2]
