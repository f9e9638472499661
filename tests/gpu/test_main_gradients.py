"""On a GPU: one kernel multiplies 16-bit numbers and adds to the fp32 sum, for one matrix and for those of experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.nn.main_grad import attach_main_grad
from mt_core.optim.master_weights import Fp32MasterWeights
from mt_core.parallel.context import ParallelContext
from mt_moe.experts.experts import load_product
from mt_moe.experts.loop import Groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, TOKENS, PASSES = 2048, 64, 8


def layer_with_weights(dtype: torch.dtype, width: int = WIDTH) -> tuple[ColumnParallelLinear, Fp32MasterWeights]:
    ctx = ParallelContext(device=torch.device("cuda"), params_dtype=dtype)
    layer = ColumnParallelLinear(width, width, ctx, bias=False, init=normal(0.02))
    initialize(layer, 3, ctx)
    return layer, Fp32MasterWeights(layer)


def pairs(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (PASSES, 2, TOKENS, WIDTH)
    made = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    return [(x[None], dy[None]) for x, dy in made]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_over_micro_batches_is_that_of_fp64_within_fp32_rounding(dtype) -> None:
    layer, weights = layer_with_weights(dtype)
    reference = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device="cuda")
    for x, dy in pairs(dtype):
        layer(x).backward(dy)
        reference += dy[0].double().T @ x[0].double()
    ((_, main),) = weights.named_parameters()
    assert layer.weight.grad is None
    assert (main.grad.double() - reference).abs().max() < 1e-5 * reference.abs().max()


def test_the_first_product_of_a_step_is_written_over_what_was_there() -> None:
    layer, weights = layer_with_weights(torch.bfloat16)
    sums = []
    for _ in range(2):
        weights.zero_grad()
        for x, dy in pairs(torch.bfloat16):
            layer(x).backward(dy)
        weights.reduce()
        ((_, main),) = weights.named_parameters()
        sums.append(main.grad.clone())
    assert torch.equal(*sums)


def test_a_backward_pass_takes_less_memory_than_a_16_bit_gradient() -> None:
    width = 8192  # The gradient has 128 MiB, cuBLAS's workspace, which is allocated for each product, 32.
    layer, _ = layer_with_weights(torch.bfloat16, width)
    x, dy = (torch.randn(1, TOKENS, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    layer(x).backward(dy)  # what is made by the first call
    out = layer(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(dy)
    assert torch.cuda.max_memory_allocated() - before < 2 * width * width / 2


PRODUCTS = pytest.mark.parametrize("name", ["loop", "grouped", "triton"])
COUNTS = pytest.mark.parametrize("counts", [(300, 0, 17, 1), (64, 64, 64, 64)], ids=["uneven", "even"])
SIZES = (1040, 528)
"""Rows and columns of an expert's matrix: no multiples of a tile."""


def experts(dtype: torch.dtype) -> tuple[torch.nn.Parameter, Tensor]:
    """Weights and their fp32 sum."""
    weight = torch.nn.Parameter(torch.randn(4, *SIZES, device="cuda").mul_(0.02).to(dtype))
    total = torch.zeros(weight.shape, device="cuda")
    attach_main_grad(weight, total)
    return weight, total


@PRODUCTS
@COUNTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_sum_over_micro_batches_is_that_of_fp64_within_fp32_rounding(name, counts, dtype) -> None:
    weight, total = experts(dtype)
    expected = total.double()
    for _ in range(PASSES):
        x, dy = (torch.randn(sum(counts), size, device="cuda").to(dtype) for size in reversed(SIZES))
        load_product(name)(x.requires_grad_(), weight, Groups(torch.tensor(counts, device="cuda"))).backward(dy)
        for matrix, rows, grad in zip(expected, x.detach().split(counts), dy.split(counts), strict=True):
            matrix += grad.double().T @ rows.double()
    assert weight.grad is None
    assert (total.double() - expected).abs().max() < 1e-5 * expected.abs().max()


@PRODUCTS
def test_a_backward_pass_of_experts_takes_less_memory_than_their_16_bit_gradient(name) -> None:
    weight, _ = experts(torch.bfloat16)
    groups = Groups(torch.tensor((30, 0, 17, 1), device="cuda"))
    x = torch.randn(48, SIZES[1], device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(48, SIZES[0], device="cuda", dtype=torch.bfloat16)
    load_product(name)(x, weight, groups).backward(dy)
    out = load_product(name)(x, weight, groups)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(dy)
    assert torch.cuda.max_memory_allocated() - before < 2 * weight.numel()


def test_one_kernel_of_experts_reads_nothing_on_the_host() -> None:
    weight, total = experts(torch.bfloat16)
    counts = torch.tensor((30, 0, 17, 1), device="cuda")
    x = torch.randn(48, SIZES[1], device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(48, SIZES[0], device="cuda", dtype=torch.bfloat16)
    load_product("grouped")(x, weight, Groups(counts)).backward(dy)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        load_product("grouped")(x, weight, Groups(counts)).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.any()
