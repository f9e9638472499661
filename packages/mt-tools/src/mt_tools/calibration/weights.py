"""Codes and scales of one weight, from its values and the statistics of its inputs; which range of its numbers a
group's codes reach over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mt_ckpt.quantized.calibrated import CalibratedWeight
from mt_ckpt.quantized.grids import Grid, Scales, full_range, in_groups, rounded
from mt_ckpt.quantized.quantizer import PacksCodes
from mt_tools.calibration.gptq import UnsolvableError, gptq_codes, nearest_codes
from mt_tools.calibration.matrices import Matrix
from mt_tools.calibration.options import CalibrationOptions
from mt_tools.calibration.statistics import InputStatistics

RangeMethod = Literal["max", "percentile", "mse"]
SHRINK = tuple(1.0 - step / 50 for step in range(26))
"""Parts of a group's range that are tried, from all to half of it."""


def chosen_scales(
    grid: Grid,
    weight: Tensor,
    method: RangeMethod,
    dtype: torch.dtype,
    largest: float,
    *,
    importance: Tensor | None = None,
    percentile: float = 99.9,
) -> Scales:
    """Scales of all groups of a weight [out, in] in fp32.

    dtype: of stored scales. largest: magnitude of the whole matrix. importance: [in], mean squares of the inputs, by
    which mse weighs the errors of columns; None: alike. percentile: of the magnitudes of a group.
    """
    groups = in_groups(weight, grid.size)
    if method == "max":
        return full_range(grid, groups, dtype, largest)
    if method == "percentile":
        share = percentile / 100
        low, high = groups.quantile(1 - share, dim=-1), groups.quantile(share, dim=-1)
        return grid.scales(low.clamp(max=0), high.clamp(min=0), dtype, largest)
    return _least_error(grid, groups, dtype, largest, importance)


def _least_error(grid: Grid, groups: Tensor, dtype: torch.dtype, largest: float, importance: Tensor | None) -> Scales:
    low, high = groups.amin(-1), groups.amax(-1)
    weights = torch.ones_like(groups[:1]) if importance is None else in_groups(importance[None], grid.size)
    best = torch.full_like(low, torch.inf)
    part = torch.ones_like(low)
    for shrink in SHRINK:
        scales = grid.scales(low * shrink, high * shrink, dtype, largest)
        error = ((rounded(grid, groups, scales) - groups).square_() * weights).sum(-1)
        better = error < best
        best, part = torch.where(better, error, best), torch.where(better, shrink, part)
    return grid.scales(low * part, high * part, dtype, largest)


@dataclass
class WeightReport:
    """name: canonical. error: of the outputs over the calibration inputs, relative: sqrt(tr(E M E^T) / tr(W M W^T))
    with second moments M, where they are kept, else their diagonal. unseen: experts with too few tokens, or [0] of a
    weight without experts -> tokens. notes: what was done otherwise than asked."""

    name: str
    error: float = 0.0
    unseen: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class WeightCalibration:
    """How one weight is quantized."""

    def __init__(self, options: CalibrationOptions, quantizer: PacksCodes) -> None:
        self.options, self.quantizer = options, quantizer
        self.grid = quantizer.grid

    def calibrate(
        self, matrix: Matrix, statistics: list[InputStatistics], stored: torch.dtype
    ) -> tuple[CalibratedWeight, Tensor, WeightReport]:
        """What is stored, the values that it stands for, and what to tell. stored: dtype of the weight in files.

        Collective over ranks that shard the weight, which all compute the same.
        """
        values, report = matrix.gather(), WeightReport(matrix.name)
        largest = matrix.largest(values)
        each = values if matrix.has_experts else values[None]
        calibrated_weights: list[CalibratedWeight] = []
        errors = torch.zeros(2, dtype=torch.float64)
        for number, (weight, inputs) in enumerate(zip(each, statistics, strict=True)):
            calibrated = self._one(weight, inputs, stored, largest, matrix.first_expert + number, report)
            calibrated_weights.append(calibrated)
            errors += _error(weight, self.values(calibrated), inputs)
        report.error = float((errors[0] / errors[1].clamp(min=torch.finfo(torch.float64).tiny)).sqrt())
        result = _stacked(calibrated_weights) if matrix.has_experts else calibrated_weights[0]
        return result, self.values(result).to(self.quantizer.value_dtype(stored)), report

    def values(self, weight: CalibratedWeight) -> Tensor:
        """What codes [..., out, in] stand for, in fp32."""
        if weight.codes.ndim == 2:
            return self.grid.values(in_groups(weight.codes, self.grid.size), weight.scales).flatten(1)
        return torch.stack([self.values(_expert(weight, number)) for number in range(len(weight.codes))])

    def _one(
        self,
        weight: Tensor,
        inputs: InputStatistics,
        stored: torch.dtype,
        largest: float,
        number: int,
        report: WeightReport,
    ) -> CalibratedWeight:
        tokens = int(inputs.count)
        is_seen = tokens >= self.options.min_tokens
        if not is_seen:
            report.unseen[number] = tokens
        scales = chosen_scales(
            self.grid,
            weight,
            self.options.range_method,
            self.quantizer.scale_dtype(stored),
            largest,
            importance=inputs.mean_squares if is_seen else None,
            percentile=self.options.percentile,
        )
        codes = nearest_codes(weight, self.grid, scales)
        if self.options.uses_gptq and is_seen and inputs.moments is not None:
            try:
                codes = gptq_codes(
                    weight,
                    inputs.moments,
                    self.grid,
                    scales,
                    damping=self.options.damping,
                    by_activity=self.options.by_activity,
                )
            except UnsolvableError:
                report.notes.append(f"{report.name}: second moments cannot be inverted; rounded to the nearest")
        return CalibratedWeight(codes, scales, largest)


def _expert(weight: CalibratedWeight, number: int) -> CalibratedWeight:
    zeros = None if weight.scales.zeros is None else weight.scales.zeros[number]
    return CalibratedWeight(weight.codes[number], Scales(weight.scales.scale[number], zeros, weight.scales.whole), 0.0)


def _error(weight: Tensor, values: Tensor, inputs: InputStatistics) -> Tensor:
    """Squared errors of outputs, and squared outputs."""
    difference = values - weight
    if not int(inputs.count):
        return torch.stack([difference.double().square().sum(), weight.double().square().sum()]).cpu()
    if inputs.moments is None:
        parts = [(x.square() * inputs.squares).double().sum() for x in (difference, weight)]
    else:
        parts = [((x @ inputs.moments) * x).double().sum() for x in (difference, weight)]
    return torch.stack(parts).cpu()


def _stacked(weights: list[CalibratedWeight]) -> CalibratedWeight:
    def joined(tensors: list[Tensor]) -> Tensor:
        # As bytes: few operations take float8.
        return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)

    zeros = [weight.scales.zeros for weight in weights if weight.scales.zeros is not None]
    scale = joined([weight.scales.scale for weight in weights])
    scales = Scales(scale, joined(zeros) if zeros else None, weights[0].scales.whole)
    return CalibratedWeight(joined([weight.codes for weight in weights]), scales, weights[0].largest)
