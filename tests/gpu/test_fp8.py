"""On a GPU: FP8 products of torch against the emulated ones, layers against fp64, experts, and compiled blocks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest
import torch
from tests.core.nn.fp8.test_joined_feed_forward import SIZES, feed_forward
from tests.core.nn.fp8.test_products import PAIRS
from tests.core.nn.kernels.interpreter import implementation
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.config.schema import PrecisionConfig
from mt_core.nn.fp8.multiply import emulated_product, torch_product
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.reference.fp8_casts import E4M3, E5M2, TorchCasts
from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_core.train import Callback, Run, Trainer
from mt_moe.experts.fp8 import EmulatedGroups, Fp8GroupedProduct, TorchGroups
from mt_moe.experts.loop import Groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]
RECIPES = {"tensorwise": "hybrid", "delayed": "hybrid", "rowwise": "hybrid", "blockwise": "e4m3"}
"""precision.fp8_recipe -> fp8_format. torch's product of blocks takes e4m3 alone."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def off(mine: Tensor, reference: Tensor) -> float:
    return ((mine.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(384, 512, 640), (33, 256, 128)])
def test_products(pair: str, left: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, columns, length = shape
    cast_a, cast_b = PAIRS[pair]
    if left is E5M2 and "128" in pair:
        pytest.skip("torch's product of blocks takes e4m3 alone")
    a, b = cast_a(random(rows, length), left), cast_b(random(columns, length, seed=1), E4M3)
    exact = emulated_product(a, b, torch.float32, fast=False)
    assert off(torch_product(a, b, torch.bfloat16, fast=False), exact) < 4e-3
    assert off(torch_product(a, b, torch.bfloat16, fast=True), exact) < 1e-2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(512, 2048), (37, 528)])
def test_casts_give_the_bytes_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    triton, plain, x = implementation("fp8_cast", "triton")(), TorchCasts(), random(*shape) * 3.0
    amax = plain.amaxes(x)
    wanted = plain.by_amaxes(x, amax, dtype, 0, "both")
    noted = torch.zeros((), device="cuda")
    for cast in (
        triton.by_amaxes(x, triton.amaxes(x), dtype, 0, "both"),
        triton.by_past(x, amax, noted, dtype, 0, "both"),
    ):
        assert torch.equal(cast.scale, wanted.scale)
        assert torch.equal(cast.cast.data.view(torch.uint8), wanted.cast.data.view(torch.uint8))
        assert torch.equal(cast.along_rows().data.view(torch.uint8), wanted.along_rows().data.view(torch.uint8))
    assert torch.equal(noted, amax)
    for kind in ("rows", "row_blocks", *(["square_blocks"] if shape[0] % 128 == 0 else [])):
        for given in (x, x.t()):
            one, other = (getattr(casts, kind)(given, dtype, 0) for casts in (triton, plain))
            assert torch.equal(one.scale, other.scale)
            assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [(2, 512), (3, 37)])
def test_layers(recipe: str, tokens: tuple[int, int]) -> None:
    """Also a number of tokens that no product takes without padding."""
    ctx = ParallelContext(device=torch.device("cuda", 0), params_dtype=torch.bfloat16)
    layer = ColumnParallelLinear(512, 1024, ctx, bias=True, init=normal(0.05))
    options = Fp8Options(PrecisionConfig(dtype="bf16", fp8_format=RECIPES[recipe], fp8_recipe=recipe), "torch", 1)
    history = options.history(ctx) if recipe == "delayed" else None
    if history is not None:
        layer.add_module("fp8", history)
    layer.multiply = options.multiply(layer, history)
    initialize(layer, 0, ctx)
    x, grad = random(*tokens, 512).requires_grad_(), random(*tokens, 1024, seed=3)
    out = layer(x)
    out.backward(grad)
    rows, of_rows, weight = (
        x.detach().flatten(0, 1).double(),
        grad.flatten(0, 1).double(),
        layer.weight.detach().double(),
    )
    assert off(out.flatten(0, 1), rows @ weight.T) < 0.05
    assert off(x.grad.flatten(0, 1), of_rows @ weight) < 0.07
    assert off(layer.weight.grad, of_rows.T @ rows) < 0.07


def test_experts() -> None:
    counts = torch.tensor([100, 0, 1, 300, 47, 16], device="cuda")
    x, weight, grad = random(464, 256), random(6, 512, 256, seed=1), random(464, 512, seed=2)
    found = []
    for groups in (TorchGroups(), EmulatedGroups()):
        own, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = Fp8GroupedProduct(groups, 0, True)(own, matrix, Groups(counts))
        out.backward(grad)
        found.append((out.detach(), own.grad, matrix.grad))
    for mine, emulated in zip(*found, strict=True):
        assert off(mine, emulated) < 1e-2


SHORT_RUN = [
    "model.num_layers=2",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1536",
    "data.seq_length=256",
    "train.train_iters=60",
    "train.eval_interval=null",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "optimizer.lr=5e-4",
    "precision.dtype=bf16",
]


class Losses(Callback):
    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def on_step_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.of_steps.append(metrics["loss"])


def losses_of_steps(*more: str) -> list[float]:
    losses = Losses()
    Trainer(load_config(preset="gpt-tiny", overrides=[*SHORT_RUN, *more]), callbacks=[losses]).train()
    return losses.of_steps


@pytest.fixture(scope="module")
def losses_in_bf16() -> list[float]:
    return losses_of_steps()


@pytest.mark.parametrize("compile_", ["none", "blocks"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_stay_near_bf16(recipe: str, compile_: str, losses_in_bf16: list[float]) -> None:
    """By the mean over all steps: the loss at the end of so short a run is chaotic. On an H200 that of fp32 was up to
    1.8 % from that of bf16, over ten seeds; the mean over all steps up to 0.25 %, over six, and that of FP8 0.9 %."""
    fp8 = [f"precision.fp8_format={RECIPES[recipe]}", f"precision.fp8_recipe={recipe}", "precision.fp8_min_features=1"]
    losses = losses_of_steps(*fp8, f"train.compile={compile_}")
    assert losses[0] == pytest.approx(losses_in_bf16[0], rel=0.002)
    assert statistics.mean(losses) == pytest.approx(statistics.mean(losses_in_bf16), rel=0.01)


@pytest.mark.parametrize("recipe", RECIPES)
def test_activations_that_casts_compute(recipe: str) -> None:
    """As separate kernels do, up to multiplications and additions that a compiler joins in one of them."""
    x, grad = random(4, 300, SIZES[recipe]), random(4, 300, SIZES[recipe], seed=1)
    found = []
    for joined in (False, True):
        module = feed_forward(recipe, "swiglu", joined=joined, device="cuda")
        given = x.detach().requires_grad_()
        out = module(given)
        out.backward(grad)
        found.append((out, given.grad, module.linear_fc1.weight.grad, module.linear_fc2.weight.grad))
    for one, other in zip(*found, strict=True):
        assert off(other, one) < 2e-2
