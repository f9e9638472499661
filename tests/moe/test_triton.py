"""Triton kernels under Triton's interpreter, against the torch references. On a rank, since the server that ranks are
forked from has set TRITON_INTERPRET before Triton is imported."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tests.core.nn.test_main_gradients import Zeroed
from tests.moe.moe_cases import HIDDEN, Shape, build_layer, options, tokens_of

from mt_core.nn.main_grad import attach_main_grad, clear_all
from mt_core.parallel.context import ParallelContext
from mt_core.testing import run_ranks
from mt_moe.experts.loop import Groups, loop_product
from mt_moe.permutation import Routing, RowKernels, RowOrder, gather_rows, permute, sort_by_expert, sum_rows, unpermute

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def differences(rank: int, world: int) -> dict[str, float]:
    return {**rows(), **permutations(), **products(), **permuting_products(), **sums(False), **sums(True), **layers()}


def rows() -> dict[str, float]:
    from mt_moe.kernels.rows import triton_gather_rows, triton_sum_rows

    found = {}
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(7, 1030, dtype=dtype)  # more columns than a program has
        wanted = torch.tensor([3, -1, 6, 0, 0])
        places = torch.tensor([[0, 2, 6], [3, -1, 1], [-1, -1, -1]])
        found[f"gather {dtype}"] = difference(triton_gather_rows(x, wanted, False), gather_rows(x, wanted, False))
        found[f"sum {dtype}"] = difference(triton_sum_rows(x, places, False), sum_rows(x, places, False))
    empty = triton_gather_rows(torch.randn(3, 4), torch.zeros(0, dtype=torch.int64), True)
    found["empty"] = float(empty.shape != (0, 4))
    return found


def routings() -> dict[str, Routing]:
    """Experts without rows, dropped choices, empty places, no tokens."""
    experts = torch.tensor([[4, 0, 6], [0, 1, 4], [6, 4, 0]])  # of 7: 2, 3 and 5 have none
    kept = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    return {
        "all": Routing(experts, torch.ones(3, 3), 7),
        "dropped": Routing(experts, torch.ones(3, 3), 7, kept),
        "padded": Routing(experts, torch.ones(3, 3), 7, kept, padded_to=3),
        "none": Routing(experts[:0], torch.ones(0, 3), 7),
    }


def permutations() -> dict[str, float]:
    """There and back with gradients, with an odd width."""
    from mt_moe.kernels.rows import TRITON_ROWS

    found = {}
    for name, routing in routings().items():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(len(routing.experts), 1029, dtype=dtype)
            values = []
            for kernels in (TRITON_ROWS, RowKernels()):
                permutation, _ = sort_by_expert(routing, kernels)
                value = x.clone().requires_grad_()
                there = permute(value, permutation, 3)
                back = unpermute(there * there, permutation, 3)
                (gradient,) = torch.autograd.grad(back, value, torch.cos(x))
                values.append((there, back, gradient))
            for step, mine, wanted in zip(("there", "back", "gradient"), *values, strict=True):
                found[f"{step} {name} {dtype}"] = rounding_apart(mine, wanted)
    return found


def rounding_apart(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 for the same bits; in bf16 for the same sums in fp32, of which Triton's interpreter cuts off the rest."""
    if wanted.dtype == torch.bfloat16:
        return float(not torch.allclose(mine.float(), wanted.float(), rtol=2**-6, atol=1e-6))
    return float(not torch.equal(mine, wanted))


def products() -> dict[str, float]:
    """Rows that belong to no expert are last, and widths are such that TMA can load them, or not."""
    from mt_moe.experts.triton import TritonProduct
    from mt_moe.kernels.tiles import describe

    found = {}
    for counts, width in (([5, 0, 70, 1], 40), ([5, 0, 70, 1], 41), ([0, 0, 0, 3], 40)):
        x = torch.cat([torch.randn(sum(counts), width), torch.full((3, width), float("nan"))]).requires_grad_()
        weight = torch.randn(4, 72, width, requires_grad=True)
        values = []
        for product in (TritonProduct(), loop_product):
            out = product(x, weight, Groups(torch.tensor(counts)))[:-3]
            dx, dweight = torch.autograd.grad(out.sin().sum(), [x, weight])
            values.append((out, dx[:-3], dweight))
        for name, mine, wanted in zip(("out", "dx", "dweight"), *values, strict=True):
            found[f"{name} {counts} {width}"] = difference(mine, wanted)
        found[f"by TMA {width}"] = float((describe(x) is None) == (width == 40))
    return found


def permuting_products() -> dict[str, float]:
    """Tokens gathered while loaded and scattered while stored, with gradients, against products of permuted rows."""
    from mt_moe.experts.triton import TritonProduct

    found = {}
    for name, routing in routings().items():
        permutation, counts = sort_by_expert(routing, RowKernels())
        order, groups = RowOrder(permutation, 3), Groups(counts)
        x = torch.randn(len(routing.experts), 40, requires_grad=True)
        weights = [(0.1 * torch.randn(7, *shape)).requires_grad_() for shape in ((72, 40), (40, 72))]
        values = []
        for mine in (True, False):
            if mine:
                inner = TritonProduct().of_tokens(x, weights[0], groups, order)
                out = TritonProduct().to_tokens(inner.sin(), weights[1], groups, order)
            else:
                inner = loop_product(order.permute(x), weights[0], groups)
                out = order.unpermute(loop_product(inner.sin(), weights[1], groups))
            values.append((out, *torch.autograd.grad(out.cos().sum(), [x, *weights])))
        for value, own, wanted in zip(("out", "dx", "dw1", "dw2"), *values, strict=True):
            found[f"{value} of tokens, {name}"] = difference(own, wanted)
    return found


def sums(cleared: bool) -> dict[str, float]:
    """Gradients of 16-bit experts, added to fp32: more than a tile each way, experts without rows, two passes. In fp16,
    as Triton's interpreter cannot multiply bf16. cleared: before the first pass, which leaves nothing to be zeroed."""
    from mt_moe.experts.triton import TritonProduct

    weight = torch.nn.Parameter(torch.randn(4, 130, 270).half())
    before = torch.zeros(4, 130, 270) if cleared else torch.randn(4, 130, 270)
    expected, total = before.double(), before.clone()
    main = attach_main_grad(weight, total)
    if cleared:
        clear_all([main])
        total.fill_(float("nan"))
    found = {"zeros": 0.0}
    for counts in ([5, 0, 70, 1], [0, 0, 3, 2]):
        x, grad = torch.randn(sum(counts), 270).half(), torch.randn(sum(counts), 130).half()
        with Zeroed() as zeroed:
            TritonProduct()(x, weight, Groups(torch.tensor(counts))).backward(grad)
        for matrix, rows, dy in zip(expected, x.split(counts), grad.split(counts), strict=True):
            matrix += dy.double().T @ rows.double()
        found["zeros"] += sum(size == total.numel() for size in zeroed.sizes)
    found |= {
        "sum": difference(total.double(), expected),
        "sum without rows": float(not torch.equal(total[1], before[1])),
        "a gradient beside the sum": float(weight.grad is not None),
    }
    return {f"{name}, {cleared=}": value for name, value in found.items()}


def layers() -> dict[str, float]:
    """The layer with both kernels, tokens dropped and padded."""
    x = tokens_of(2, 5, torch.float32)
    keys = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    outputs = []
    for own in ({"moe_permute_fusion": True, "moe_grouped_gemm": "triton"}, {"moe_grouped_gemm": "loop"}):
        layer = build_layer(options(**keys, **own), ParallelContext(), Shape(add_bias_linear=True))
        value = x.clone().requires_grad_()
        out = layer(value)
        outputs.append((out, *torch.autograd.grad(out.sin().sum(), [value, layer.experts.linear_fc1.weight])))
    found = {f"layer {i}": difference(*pair) for i, pair in enumerate(zip(*outputs, strict=True))}
    return found | kept()


def kept() -> dict[str, float]:
    """What the forward pass keeps for the backward pass: rows [tokens * k, H] where the products do not permute."""
    from tests.moe.test_dispatch import kept_elements

    x = tokens_of(2, 5, torch.float32)
    sizes = []
    for fusion in (True, False):
        keys = {"moe_permute_fusion": fusion, "moe_grouped_gemm": "triton"}
        sizes.append(kept_elements(build_layer(options(**keys), ParallelContext()), x))
    return {"kept": abs(sizes[1] - sizes[0] - 10 * 2 * HIDDEN)}


def difference(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest one, relative to the largest value."""
    if not (wanted.numel() and wanted.any() and wanted.isfinite().all() and mine.isfinite().all()):
        return float(not torch.equal(mine, wanted))
    return ((mine - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.slow
def test_kernels_compute_what_torch_does() -> None:
    (found,) = run_ranks(1, differences)
    assert max(found.values()) < 1e-5, found
