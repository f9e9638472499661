"""On a GPU: one kernel multiplies 16-bit numbers and adds to the fp32 sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.optim.main_weights import CopiedWeights
from mt_core.parallel.context import ParallelContext

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, TOKENS, PASSES = 2048, 64, 8


def layer_with_weights(dtype: torch.dtype) -> tuple[ColumnParallelLinear, CopiedWeights]:
    ctx = ParallelContext(device=torch.device("cuda"), params_dtype=dtype)
    layer = ColumnParallelLinear(WIDTH, WIDTH, ctx, bias=False, init=normal(0.02))
    initialize(layer, 3, ctx)
    return layer, CopiedWeights(layer)


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


def test_a_backward_pass_takes_less_memory_than_a_16_bit_gradient() -> None:
    layer, _ = layer_with_weights(torch.bfloat16)
    x, dy = pairs(torch.bfloat16)[0]
    layer(x).backward(dy)  # a library's workspace is made by its first call
    out = layer(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(dy)
    assert torch.cuda.max_memory_allocated() - before < 2 * WIDTH * WIDTH
