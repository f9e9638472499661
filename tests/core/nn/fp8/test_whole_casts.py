"""Casts by Triton's kernels, interpreted, against those in plain torch: every byte, scale and noted magnitude."""

from __future__ import annotations

import pytest
import torch
from tests.core.nn.fp8.test_casts import NAMES, wide_values
from tests.core.nn.kernels.interpreter import implementation, run_interpreted

from mt_core.nn.fp8.formats import E4M3, E5M2, scale_of
from mt_core.nn.fp8.whole_casts import Along, TorchWholeCasts, WholeCast, WholeCasts

SHAPES = ((256, 128), (130, 48), (5, 16), (0, 16))


def assert_same(mine: WholeCast, wanted: WholeCast, along: Along) -> None:
    assert torch.equal(mine.scale, wanted.scale)
    if along != "rows":
        assert torch.equal(mine.cast.data.view(torch.uint8), wanted.cast.data.view(torch.uint8))
    if along != "columns":
        assert mine.column_major is not None
        one, other = mine.along_rows().data, wanted.along_rows().data
        assert one.is_contiguous()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(rank: int, world: int) -> None:
    triton, plain = implementation("fp8_cast", "triton")(), TorchWholeCasts()
    for name, margin, dtype in (("e4m3", 0, torch.bfloat16), ("e5m2", 2, torch.float32)):
        for rows, columns in SHAPES:
            x = wide_values(max(rows, 1), columns)[:rows].to(dtype)
            # the three numbers around a half of the smallest number of the format
            x.view(-1)[16:19] = x.abs().max() / torch.finfo(NAMES[name]).max * torch.finfo(NAMES[name]).tiny if rows else 0
            for along in ("both", "columns", "rows"):
                check_all(triton, plain, x, NAMES[name], margin, along)


def check_all(
    triton: WholeCasts, plain: WholeCasts, x: torch.Tensor, dtype: torch.dtype, margin: int, along: Along
) -> None:
    amax = plain.amaxes(x)
    assert torch.equal(triton.amaxes(x).amax(), amax)
    assert_same(
        triton.by_amaxes(x, triton.amaxes(x), dtype, margin, along), plain.by_amaxes(x, amax, dtype, margin, along), along
    )
    scale = scale_of(amax, dtype, margin)
    assert_same(triton.by_scale(x, scale, dtype, along), plain.by_scale(x, scale, dtype, along), along)
    for past in (amax / 3 + 1e-3, amax * 2 + 1.0):  # saturated, and not
        noted, wanted = torch.full((), 0.5), torch.full((), 0.5)
        assert_same(
            triton.by_past(x, past, noted, dtype, margin, along), plain.by_past(x, past, wanted, dtype, margin, along), along
        )
        assert torch.equal(noted, wanted)


def test_bytes_scales_and_magnitudes_are_torchs() -> None:
    run_interpreted(check)


def check_every_number(rank: int, world: int) -> None:
    """All finite bf16 numbers, with the scale 1."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite()].reshape(-1, 16)
    triton, plain, one = implementation("fp8_cast", "triton")(), TorchWholeCasts(), torch.ones(())
    for dtype in (E4M3, E5M2):
        assert_same(triton.by_scale(x, one, dtype, "columns"), plain.by_scale(x, one, dtype, "columns"), "columns")


def test_every_bf16_number() -> None:
    run_interpreted(check_every_number)


def check_not_finite(rank: int, world: int, bad: float) -> None:
    casts, x = implementation("fp8_cast", "triton")(), torch.ones(32, 16)
    x[3, 4] = bad
    noted = torch.ones(())
    for cast in (casts.by_amaxes(x, casts.amaxes(x), E4M3, 0, "both"), casts.by_past(x, noted, noted, E4M3, 0, "both")):
        assert bool(cast.along_columns().decode().isnan().all())
        assert bool(cast.along_rows().decode().isnan().all())
    assert noted.item() == 1.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_matrix_that_is_not_finite_becomes_nan_and_is_not_noted(bad: float) -> None:
    run_interpreted(check_not_finite, bad)
