"""Products of scaled matrices: against fp64, against torch's scaled_mm on the CPU, and how operands reach a GPU's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core._torch_compat import has_scaled_mm_on_cpu
from mt_core.nn.fp8 import multiply
from mt_core.nn.fp8.multiply import emulated_product, torch_product
from mt_core.nn.kernels.reference.fp8_casts import (
    E4M3,
    E5M2,
    Scaled,
    cast_row_blocks,
    cast_rows,
    cast_square_blocks,
    cast_tensor,
    scale_of,
)


def by_tensor(x: Tensor, dtype: torch.dtype) -> Scaled:
    return cast_tensor(x, scale_of(x.abs().max().float(), dtype), dtype)


PAIRS = {
    "tensor": (by_tensor, by_tensor),
    "row": (cast_rows, cast_rows),
    "1x128 and 128x128": (cast_row_blocks, cast_square_blocks),
    "1x128 twice": (cast_row_blocks, cast_row_blocks),
}


def operands(pair: str, left: torch.dtype = E4M3) -> tuple[Scaled, Scaled]:
    """[32, 640] in `left` and [256, 640] in e4m3, with rows and blocks of very different magnitudes."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 640, generator=generator) * torch.logspace(-3, 2, 32)[:, None]
    b = torch.randn(256, 640, generator=generator) * torch.logspace(2, -2, 640)
    cast_a, cast_b = PAIRS[pair]
    return cast_a(a, left), cast_b(b, E4M3)


def in_fp64(a: Scaled, b: Scaled) -> Tensor:
    """The sum over k of a.data[m, k] b.data[n, k] times the two scales, each found by its index."""

    def values(x: Scaled) -> Tensor:
        scale = x.scale.double().expand(x.data.shape) if x.scale.numel() == 1 else x.scale.double()
        rows = torch.arange(x.data.shape[0]) * scale.shape[0] // x.data.shape[0]
        columns = torch.arange(x.data.shape[1]) * scale.shape[1] // x.data.shape[1]
        return x.data.double() * scale[rows][:, columns]

    return values(a) @ values(b).T


@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_emulated_product_is_exact_up_to_fp32(pair, left) -> None:
    a, b = operands(pair, left)
    expected = in_fp64(a, b)
    found = emulated_product(a, b, torch.float32, fast=False)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-6


@pytest.mark.skipif(not has_scaled_mm_on_cpu(), reason="this torch has no scaled_mm on a CPU")
@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("pair", ["tensor", "row"])
def test_torch_multiplies_the_same_numbers_on_a_cpu(pair, left) -> None:
    a, b = operands(pair, left)
    expected = in_fp64(a, b)
    found = torch_product(a, b, torch.float32, fast=True)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-6


def as_hopper_wants_it(a, b, scales, recipes, dtype, *, fast) -> Tensor:
    """In place of scaled_mm of a GPU: checks formats, sizes and strides as its documentation of operands states them
    (cuBLAS 12.9 for blocks), and multiplies element by element what it is given."""
    (m, k), n = a.shape, b.shape[1]
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert k % 16 == 0
    assert n % 16 == 0
    (scale_a, scale_b), (recipe_a, recipe_b) = scales, recipes
    kinds = F.ScalingType
    assert scale_a.dtype == scale_b.dtype == torch.float32
    row, block = torch.arange(m), torch.arange(k) // 128
    if recipe_a == kinds.TensorWise.value:
        assert scale_a.numel() == scale_b.numel() == 1
        left, right = a.float() * scale_a, b.float() * scale_b
    elif recipe_a == kinds.RowWise.value:
        assert scale_a.shape == (m, 1)
        assert scale_b.shape == (1, n)
        assert scale_b.stride(1) == 1
        left, right = a.float() * scale_a, b.float() * scale_b
    else:
        assert recipe_a == kinds.BlockWise1x128.value
        assert not fast
        assert scale_a.shape == (m, k // 128)
        assert scale_a.stride() == (1, m)
        left = a.float() * scale_a[row][:, block]
        if recipe_b == kinds.BlockWise1x128.value:
            assert scale_b.shape == (n, k // 128)
            assert scale_b.stride() == (1, n)
            right = b.float() * scale_b[:, block].T
        else:
            rounded_up = -(-(k // 128) // 4) * 4
            assert recipe_b == kinds.BlockWise128x128.value
            assert scale_b.shape == (rounded_up, n // 128)
            assert scale_b.stride() == (1, rounded_up)
            right = b.float() * scale_b[block][:, torch.arange(n) // 128]
    return (left @ right).to(dtype)


@pytest.mark.parametrize("pair", PAIRS)
def test_operands_and_scales_are_laid_out_as_a_gpu_takes_them(pair, monkeypatch) -> None:
    monkeypatch.setattr(multiply, "scaled_mm", as_hopper_wants_it)
    a, b = operands(pair)
    found = torch_product(a, b, torch.float32, fast=True)
    expected = in_fp64(a, b)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-6
