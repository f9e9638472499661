"""GPTQ against the update that its paper derives, with the Hessian of the columns that are left inverted anew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mt_ckpt.quantized.grids import (
    Fp8Grid,
    Grid,
    IntegerGrid,
    MxGrid,
    Nvfp4Grid,
    Scales,
    full_range,
    in_groups,
    rounded,
)
from mt_tools.calibration.gptq import gptq_codes, nearest_codes
from mt_tools.calibration.weights import chosen_scales

DAMPING = 0.01


def case(rows: int = 6, columns: int = 32, inputs: int = 200) -> tuple[Tensor, Tensor]:
    """A weight and second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(inputs, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), x.T @ x


def scales_of(weight: Tensor, grid: IntegerGrid) -> Scales:
    """A little wider than the range, so that its end is no tie between two codes."""
    groups = in_groups(1.01 * weight, grid.size)
    return full_range(grid, groups, torch.float32, 0.0)


def by_definition(weight: Tensor, moments: Tensor, grid: IntegerGrid, order: list[int]) -> Tensor:
    """Optimal brain quantization in a given order (Frantar and Alistarh, 2022): in fp64, one inverse a column."""
    hessian = moments.double()
    hessian = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    scales = scales_of(weight, grid)
    rest, left, result = weight.double().clone(), list(order), torch.zeros_like(weight)
    while left:
        column = left[0]
        inverse = torch.linalg.inv(hessian[left][:, left])
        scale = scales.scale[:, column // grid.size].double()
        half = 1 << grid.bits - 1
        rounded = (rest[:, column] / scale).round().clamp(-half, half - 1)
        error = (rest[:, column] - rounded * scale) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
        result[:, column] = rounded
        left = left[1:]
    return result


@pytest.mark.parametrize("by_activity", [False, True])
def test_codes_are_those_of_the_definition(by_activity: bool) -> None:
    weight, moments = case()
    grid = IntegerGrid(4, 8)
    order = moments.diagonal().argsort(descending=True).tolist() if by_activity else list(range(32))
    scales = scales_of(weight, grid)
    codes = gptq_codes(weight, moments, grid, scales, damping=DAMPING, by_activity=by_activity, sweeps=0)
    assert torch.equal(codes.float(), by_definition(weight, moments, grid, order))


def test_blocks_compute_what_one_block_would(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, moments = case()
    grid = IntegerGrid(4, 8, symmetric=False)
    scales = full_range(grid, in_groups(weight, 8), torch.float32, 0.0)
    whole = gptq_codes(weight, moments, grid, scales)
    monkeypatch.setattr("mt_tools.calibration.gptq.BLOCK", 5)
    assert torch.equal(gptq_codes(weight, moments, grid, scales), whole)


@pytest.mark.parametrize("grid", [IntegerGrid(4, 16), IntegerGrid(8, None), Fp8Grid(None), Nvfp4Grid(), MxGrid(4)])
def test_outputs_are_nearer_than_with_the_nearest_codes(grid: Grid) -> None:
    weight, moments = case()
    scales = full_range(grid, in_groups(weight, grid.size), torch.float32, weight.abs().max().item())

    def error(codes: Tensor) -> float:
        difference = grid.values(in_groups(codes, grid.size), scales).flatten(1) - weight
        return float(((difference @ moments) * difference).sum())

    assert error(gptq_codes(weight, moments, grid, scales)) < 0.8 * error(nearest_codes(weight, grid, scales))


def test_sweeps_end_where_no_single_code_can_be_better() -> None:
    """Each lowers the error of outputs with damped moments, by which codes are chosen."""
    weight, moments = case()
    grid = IntegerGrid(4, 8)
    scales = full_range(grid, in_groups(weight, 8), torch.float32, 0.0)
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(len(moments))

    def errors(codes: Tensor) -> Tensor:
        difference = grid.values(in_groups(codes, 8), scales).flatten(1) - weight
        return ((difference @ damped) * difference).sum(1)

    made = [gptq_codes(weight, moments, grid, scales, sweeps=sweeps) for sweeps in (0, 1, 3, 30)]
    totals = [float(errors(codes).sum()) for codes in made]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 0.97 * totals[0]
    least = errors(made[-1])
    for column in range(weight.shape[1]):
        for step in (-1, 1):
            other = made[-1].clone()
            other[:, column] = (other[:, column] + step).clamp(-8, 7)
            assert (errors(other) >= least * (1 - 1e-5)).all()


def test_a_column_without_inputs_is_rounded_as_it_is() -> None:
    weight, moments = case()
    moments[7], moments[:, 7] = 0.0, 0.0
    grid = IntegerGrid(4, 8)
    scales = full_range(grid, in_groups(weight, 8), torch.float32, 0.0)
    codes = gptq_codes(weight, moments, grid, scales)
    assert torch.equal(codes[:, 7], nearest_codes(weight, grid, scales)[:, 7])


def test_mse_has_the_least_error_of_the_ranges_that_it_tries() -> None:
    weight, moments = case()
    grid, importance = IntegerGrid(3, 8), moments.diagonal()
    groups, weights = in_groups(weight, 8), in_groups(importance[None], 8)

    def error(shrink: float) -> Tensor:
        scales = grid.scales(groups.amin(-1) * shrink, groups.amax(-1) * shrink, torch.float32, 0.0)
        return ((rounded(grid, groups, scales) - groups).square() * weights).sum(-1)

    chosen = chosen_scales(grid, weight, "mse", torch.float32, 0.0, importance=importance)
    own = ((rounded(grid, groups, chosen) - groups).square() * weights).sum(-1)
    tried = torch.stack([error(1.0 - step / 50) for step in range(26)])
    assert torch.allclose(own, tried.amin(0))
    assert (own < tried[0]).any()


def test_a_percentile_leaves_outliers_out() -> None:
    weight = torch.cat([torch.linspace(-1, 1, 31), torch.tensor([50.0])])[None]
    grid = IntegerGrid(8, 32)
    scales = chosen_scales(grid, weight, "percentile", torch.float32, 0.0, percentile=96.0)
    # [low, high] of the percentiles 4 and 96, by linear interpolation between neighbours.
    bound = max(-weight.quantile(0.04), weight.quantile(0.96)).item()
    assert scales.scale.item() == pytest.approx(bound / 127.5)
    assert bound < 1.0
