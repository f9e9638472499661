"""On a GPU: the experts' products in bf16, of tokens and of rows, against one product after another."""

from __future__ import annotations

import pytest
import torch
from tests.moe.moe_cases import Shape, build_layer, options
from torch import Tensor

from mt_core.nn.main_grad import attach_main_grad
from mt_core.parallel.context import ParallelContext
from mt_moe.layer import MoeLayer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, FFN, EXPERTS, TOKENS = 512, 384, 16, 1500


def layer(**keys: object) -> MoeLayer:
    ctx = ParallelContext(device=torch.device("cuda"), params_dtype=torch.bfloat16)
    shape = Shape(hidden_size=HIDDEN, ffn_size=FFN, init_method_std=0.05, output_init_std=0.05)
    return build_layer(options(**{"num_experts": EXPERTS, "moe_router_topk": 4, **keys}), ctx, shape)


def results(module: MoeLayer, *, accumulated: bool) -> list[Tensor]:
    """Output, and gradients of the input and of the experts' matrices: in bf16, or added to fp32."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(1, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    weights = [module.experts.linear_fc1.weight, module.experts.linear_fc2.weight]
    totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    if accumulated:
        for weight, total in zip(weights, totals, strict=True):
            attach_main_grad(weight, total)
    out = module(x)
    out.backward(torch.randn(out.shape, device="cuda", dtype=out.dtype, generator=generator))
    return [out, x.grad, *(totals if accumulated else [weight.grad for weight in weights])]


@pytest.mark.parametrize("accumulated", [False, True], ids=["bf16 gradients", "fp32 gradients"])
@pytest.mark.parametrize(
    "keys",
    [
        {"moe_grouped_gemm": "grouped"},
        {"moe_grouped_gemm": "triton"},
        {"moe_grouped_gemm": "triton", "moe_permute_fusion": False},
        {"moe_grouped_gemm": "triton", "moe_expert_capacity_factor": 1.0},
    ],
    ids=["grouped", "triton", "triton on rows", "triton, dropping"],
)
def test_products_are_those_of_one_after_another(keys: dict[str, object], accumulated: bool) -> None:
    """To 2 % of the largest value: rows are rounded to bf16 in places of their own."""
    dropping = {key: value for key, value in keys.items() if "capacity" in key}
    expected = results(layer(moe_grouped_gemm="loop", moe_permute_fusion=False, **dropping), accumulated=accumulated)
    for mine, wanted in zip(results(layer(**keys), accumulated=accumulated), expected, strict=True):
        assert (mine - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_what_is_taken_by_default() -> None:
    from mt_moe.experts.loop import PermutingProduct

    hopper = torch.cuda.get_device_capability()[0] in (9, 10)
    assert layer().experts.product == "triton"
    assert layer().experts.host_wait() is None
    assert (layer(moe_grouped_gemm="grouped").experts.host_wait() is None) == hopper
    odd = layer(moe_ffn_hidden_size=FFN + 4)
    assert odd.experts.product == "triton"
    assert isinstance(odd.experts.linear_fc1.product, PermutingProduct)
    assert odd.experts.permute_fusion


def test_rows_that_belong_to_no_expert_change_nothing() -> None:
    """As many as the router drops, and more: they are behind those of all experts and may hold anything."""
    from mt_moe.experts.experts import load_product
    from mt_moe.experts.loop import Groups

    generator = torch.Generator("cuda").manual_seed(2)
    counts = torch.tensor([70, 0, 129, 1], device="cuda")
    for name in ("grouped", "triton"):
        found = []
        for more in (0, 300):
            x = torch.randn(200, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator.manual_seed(2))
            weight = torch.randn(4, FFN, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
            rows = torch.cat([x, x.new_full((more, HIDDEN), float("nan"))]).requires_grad_()
            out = load_product(name)(rows, weight.requires_grad_(), Groups(counts))  # type: ignore[arg-type]
            dx, dweight = torch.autograd.grad(out[:200].float().sin().sum(), [rows, weight])
            found.append((out[:200], dx[:200], dweight))
        for mine, wanted in zip(*found, strict=True):
            assert torch.equal(mine, wanted), name


@pytest.mark.parametrize("gathered", [False, True])
def test_every_tile_gives_the_same_bits(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tile that a rank finds to be the fastest changes no result."""
    from mt_moe.kernels import grouped_product as kernels
    from mt_moe.kernels.tiles import OUTER, ROWS

    generator = torch.Generator("cuda").manual_seed(4)
    ends = torch.tensor([700, 700, 829, 830], device="cuda", dtype=torch.int32)
    places = torch.randint(0, 830, (830,), device="cuda", generator=generator) if gathered else None
    x, grad = (
        torch.randn(830, width, device="cuda", dtype=torch.bfloat16, generator=generator) for width in (HIDDEN, FFN)
    )
    weight = torch.randn(4, FFN, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
    memory = torch.cuda.get_device_properties().shared_memory_per_block_optin
    monkeypatch.setattr(kernels, "is_timed", lambda x: False)
    for tiles, product in (
        (ROWS, lambda: kernels.rows_times(x, weight.mT, ends, gather=places)),
        (OUTER, lambda: kernels.outer_products(grad, x, ends, right_gather=places)),
    ):
        found = []
        for tile in tiles:
            if tile.shared_memory + 2048 <= memory:
                monkeypatch.setattr(kernels, "untimed_tile", lambda tiles, x, tile=tile: tile)
                found.append(product())
        assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("hidden", [HIDDEN, HIDDEN + 4], ids=["by TMA", "by pointers"])
def test_operands_by_tma_and_by_pointers(hidden: int) -> None:
    """Widths whose rows begin at multiples of 16 bytes, and others."""
    from mt_moe.experts.experts import load_product
    from mt_moe.experts.loop import Groups

    generator = torch.Generator("cuda").manual_seed(3)
    counts = torch.tensor([700, 0, 129, 1], device="cuda")
    x = torch.randn(830, hidden, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(4, FFN, hidden, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    found = []
    for name in ("triton", "loop"):
        out = load_product(name)(x, weight, Groups(counts))  # type: ignore[arg-type]
        found.append((out, *torch.autograd.grad(out.sum(), [x, weight])))
    for mine, wanted in zip(*found, strict=True):
        assert (mine - wanted).abs().max() <= 0.02 * wanted.abs().max()
