"""Casts by Triton's kernels, interpreted, against those in plain torch: every byte, scale and noted magnitude."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.core.nn.fp8.test_casts import NAMES, wide_values
from tests.core.nn.kernels.interpreter import implementation, run_interpreted
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.config.schema import PrecisionConfig
from mt_core.nn.fp8.history import AdvanceHistories
from mt_core.nn.fp8.multiply import Fp8Multiply, emulated_product
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.kernels.reference.fp8_casts import E4M3, E5M2, Along, Casts, Scaled, TorchCasts, WholeCast, scale_of
from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext

SHAPES = ((130, 48), (5, 16), (0, 16))
SIZE = 128
COUNTS = {
    "tensorwise": [(46, 132), (7, 20)],
    "delayed": [(73, 132), (7, 14)],
    "rowwise": [(78, 200), (6, 18)],
    "blockwise": [(78, 199), (6, 18)],
}
"""By torch, and by Triton: launches, and bytes of each number of x. What a kernel reads twice counts once."""


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
    triton, plain = implementation("fp8_cast", "triton")(), TorchCasts()
    for name, margin, dtype in (("e4m3", 0, torch.bfloat16), ("e5m2", 2, torch.float32)):
        for rows, columns in SHAPES:
            x = wide_values(max(rows, 1), columns)[:rows].to(dtype)
            # the three numbers around a half of the smallest number of the format
            x.view(-1)[16:19] = (
                x.abs().max() / torch.finfo(NAMES[name]).max * torch.finfo(NAMES[name]).tiny if rows else 0
            )
            for along in ("both", "columns", "rows"):
                check_all(triton, plain, x, NAMES[name], margin, along)


def check_all(triton: Casts, plain: Casts, x: torch.Tensor, dtype: torch.dtype, margin: int, along: Along) -> None:
    amax, amaxes = plain.amaxes(x), triton.amaxes(x)
    assert torch.equal(amaxes.amax(), amax)
    of_amax = plain.by_amaxes(x, amax, dtype, margin, along)
    assert_same(triton.by_amaxes(x, amaxes, dtype, margin, along), of_amax, along)
    assert_same(triton.by_scale(x, scale_of(amax, dtype, margin), dtype, along), of_amax, along)
    for past in (amax / 3 + 1e-3, amax * 2 + 1.0):  # saturated, and not
        noted, wanted = torch.full((), 0.5), torch.full((), 0.5)
        one = triton.by_past(x, past, noted, dtype, margin, along)
        assert_same(one, plain.by_past(x, past, wanted, dtype, margin, along), along)
        assert torch.equal(noted, wanted)


@pytest.mark.slow
def test_bytes_scales_and_magnitudes_are_torchs() -> None:
    run_interpreted(check)


def use_tiles_of(by_rows: tuple[int, int], by_columns: tuple[int, int]) -> None:
    """The interpreter takes as long for a small tile as for a large one."""
    from mt_core.nn.kernels.triton_kernels import fp8_casts

    fp8_casts._ROW_TILES = {False: by_rows, True: by_columns}


def check_scales_by_line_and_block(rank: int, world: int) -> None:
    use_tiles_of((32, 64), (64, 32))
    triton, plain = implementation("fp8_cast", "triton")(), TorchCasts()
    for (rows, columns), dtype in zip(((256, 128), (130, 144), (5, 16)), (E4M3, E5M2, E4M3), strict=True):
        x = wide_values(rows, columns).bfloat16()
        x[-1] = 0.0
        x[0, -1] = float("nan")
        kinds = ("rows", "row_blocks", "square_blocks") if rows % 128 == columns % 128 == 0 else ("rows", "row_blocks")
        for kind in kinds:
            for given in (x, x.t(), torch.cat([x, x], 1)[:, :columns]):
                one, other = (getattr(casts, kind)(given, dtype, 1) for casts in (triton, plain))
                assert torch.equal(one.scale.nan_to_num(7.0), other.scale.nan_to_num(7.0))
                assert torch.equal(one.data.float().nan_to_num(7.0), other.data.float().nan_to_num(7.0))


@pytest.mark.slow
def test_bytes_and_scales_of_rows_and_blocks_are_torchs() -> None:
    run_interpreted(check_scales_by_line_and_block)


def check_every_number(rank: int, world: int) -> None:
    """All finite bf16 numbers, with the scale 1."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite()].reshape(-1, SIZE)
    triton, plain, one = implementation("fp8_cast", "triton")(), TorchCasts(), torch.ones(())
    for dtype in (E4M3, E5M2):
        assert_same(triton.by_scale(x, one, dtype, "columns"), plain.by_scale(x, one, dtype, "columns"), "columns")


@pytest.mark.slow
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


# -- in a layer ----------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Launches, and bytes that they read and write, outside of matrix products."""

    FREE = (
        "view",
        "empty",
        "new_empty",
        "t.",
        "transpose",
        "detach",
        "select",
        "alias",
        "expand",
        "unsqueeze",
        "lift",
        "as_strided",
    )

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0

    def count(self, tensors: Iterable[Any]) -> None:
        self.launches += 1
        memory = {x.data_ptr(): x.nbytes for x in tensors if isinstance(x, torch.Tensor) and x.dim()}
        self.bytes += sum(memory.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not str(func).removeprefix("aten.").startswith(self.FREE):
            self.count([*args, result])
        return result


def uncounted_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        return emulated_product(a, b, dtype, fast=fast)


def check_layer(rank: int, world: int, recipe: str) -> list[tuple[int, int]]:
    """The same bits as with casts of torch. Returns the launches and bytes of both, those per element of a matrix of
    the size of x, of which there are a weight and a gradient too."""
    from triton.runtime import interpreter

    use_tiles_of((64, SIZE), (64, SIZE))
    counted = []
    traffic = Traffic()
    launch = interpreter.GridExecutor.__call__

    def counting(self, *given: Any, **named: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            traffic.count(given)
            launch(self, *given, **named)

    interpreter.GridExecutor.__call__ = counting
    results = []
    for casts in (TorchCasts(), implementation("fp8_cast", "triton")()):
        module, x, grad = square_layer(recipe, casts), *inputs()
        for _ in range(2):  # the second step of delayed scaling has a history
            traffic = Traffic()
            x.grad = module.weight.grad = None
            with traffic:
                out = module(x)
                out.backward(grad)
            if recipe == "delayed":
                AdvanceHistories([module.fp8], ParallelContext()).after_step()
        results.append((out.detach(), x.grad.clone(), module.weight.grad))
        counted.append((traffic.launches, round(traffic.bytes / grad.numel())))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    return counted


def square_layer(recipe: str, casts: Casts) -> ColumnParallelLinear:
    ctx = ParallelContext(params_dtype=torch.bfloat16)
    module = ColumnParallelLinear(SIZE, SIZE, ctx, bias=False, init=normal(0.1))
    options = Fp8Options(PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe), "emulated", 1, casts)
    history = options.history(ctx) if recipe == "delayed" else None
    if history is not None:
        module.add_module("fp8", history)
    module.multiply = Fp8Multiply(options.scaling(history), uncounted_product, module.cut)
    initialize(module, 3, ctx)
    return module


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    x, grad = torch.randn(2, 1, SIZE, SIZE, generator=generator).bfloat16()
    return x.requires_grad_(), grad


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COUNTS)
def test_a_layer_computes_the_same_bits_in_fewer_launches_and_bytes(recipe: str) -> None:
    (counted,) = run_interpreted(check_layer, recipe)
    assert counted == COUNTS[recipe]
