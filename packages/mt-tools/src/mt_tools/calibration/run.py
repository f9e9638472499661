"""Calibration of a model: measured before, quantized layer after layer, measured after, written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mt_ckpt.quantized.quantizer import PacksCodes
from mt_core.checkpoint_lookup import MODEL
from mt_core.errors import ConfigError
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train.step.forward_backward import Batch
from mt_core.train.trained_model import TrainedModel
from mt_tools.calibration.folding import FoldingPoint, folding_points
from mt_tools.calibration.matrices import Matrix, matrices_of
from mt_tools.calibration.measure import Comparison, Measured
from mt_tools.calibration.options import CalibrationOptions
from mt_tools.calibration.passes import Passes
from mt_tools.calibration.quantized_inputs import quantized_inputs
from mt_tools.calibration.rotation import rotate_model
from mt_tools.calibration.smoothing import awq_factors, smoothquant_factors, with_factors
from mt_tools.calibration.statistics import InputStatistics, recorded_inputs
from mt_tools.calibration.store import CalibrationStore
from mt_tools.calibration.weights import WeightCalibration, WeightReport

Progress = Callable[[int, int], None]
"""(weights done, weights of this rank)"""


@dataclass
class CalibrationResult:
    """before, after: on samples that calibration has not seen. weights: of all ranks, in the order of the model."""

    before: Measured
    after: Measured
    weights: list[WeightReport] = field(default_factory=list)

    def as_values(self) -> dict[str, Any]:
        measured = {
            name: {**asdict(part), "perplexity": part.perplexity}
            for name, part in (("before", self.before), ("after", self.after))
        }
        return {**measured, "weights": [asdict(weight) for weight in self.weights]}


def calibrate_model(
    trained: TrainedModel,
    options: CalibrationOptions,
    batches: Sequence[Batch],
    eval_batches: Sequence[Batch],
    stored: Mapping[str, torch.dtype],
    store: CalibrationStore,
    progress: Progress = lambda done, total: None,
) -> CalibrationResult:
    """Quantize the model in place, and put codes and scales into `store`.

    batches, eval_batches: of this rank. stored: dtypes of the model's files, by canonical name. Collective over the
    world. Raises ConfigError for a scheme that cannot hold a matrix, and a model that predicts no tokens.
    """
    quantizer = options.quantizer()
    for matrix in matrices_of(trained.model):
        require_fit(matrix, options)
    passes = Passes(trained)
    comparison = Comparison(passes, eval_batches, store)
    before = comparison.measure()
    assert isinstance(quantizer, PacksCodes)
    rotate(trained, options, stored, store)
    weights = _Weights(trained.model, WeightCalibration(options, quantizer), stored, store, progress)
    passes.by_layer(batches, weights.visit)
    weights.finish()
    with quantized_inputs(trained.model, quantizer.input_grid):
        after = comparison.measure()
    return CalibrationResult(before, after, _of_all_ranks(weights.reports, trained))


def rotate(
    trained: TrainedModel, options: CalibrationOptions, stored: Mapping[str, torch.dtype], store: CalibrationStore
) -> None:
    """Apply the rotations of the options to the model, and store what is no matrix of a linear layer. Collective."""
    chosen = {"residual": "rotate" in options.methods, "values": "rotate-values" in options.methods}
    if not any(chosen.values()):
        return
    dtype = stored[MODEL + next(matrices_of(trained.model)).name]
    changed = rotate_model(trained.model, trained.ctx, **chosen, dtype=dtype)
    if trained.ctx.tp.rank == 0 and trained.ctx.dp_cp.rank == 0:
        for name, value in changed.items():
            store.change(name, value)


def require_fit(matrix: Matrix, options: CalibrationOptions) -> None:
    objection = options.quantizer().objection(matrix.layout.shape[-2:])
    if objection is not None:
        hint = "; schemes with groups take their size, such as w4a16-g32" if "multiple" in objection else ""
        raise ConfigError(f"--scheme {options.scheme}: {matrix.name} cannot be quantized: {objection}{hint}")


class _Weights:
    """Quantizes the weights of each part of the model once their inputs are known."""

    def __init__(
        self,
        model: nn.Module,
        calibration: WeightCalibration,
        stored: Mapping[str, torch.dtype],
        store: CalibrationStore,
        progress: Progress,
    ) -> None:
        self.calibration, self.stored, self.store, self.progress = calibration, stored, store, progress
        self.matrices = list(matrices_of(model))
        has_factors = calibration.options.factors is not None
        self.points = list(folding_points(model, self.matrices)) if has_factors else []
        self.reports: dict[str, WeightReport] = {}

    def visit(self, modules: Collection[nn.Module], compute: Callable[[], None]) -> None:
        chosen = [m for m in self.matrices if m.module in modules and m.name not in self.reports]
        if not chosen:
            return
        with recorded_inputs(chosen, moments=self.calibration.options.needs_moments) as statistics:
            compute()
        for point in self.points:
            if point.matrix in chosen and int(statistics[point.matrix.name][0].count):
                self._fold(point, statistics[point.matrix.name][0])
        for matrix in chosen:
            # What another stage of this rank computes is visited there.
            if any(int(inputs.count) for inputs in statistics[matrix.name]):
                self._quantize(matrix, statistics[matrix.name])

    def _fold(self, point: FoldingPoint, inputs: InputStatistics) -> None:
        weight, options = point.matrix.gather(), self.calibration.options
        if options.factors == "smoothquant":
            factors = smoothquant_factors(weight, inputs, options.alpha)
        else:
            dtype = self.calibration.quantizer.scale_dtype(self.stored[MODEL + point.matrix.name])
            factors = awq_factors(weight, inputs, self.calibration.grid, dtype)
        for name, value in point.fold(factors, self.stored[MODEL + point.matrix.name]).items():
            if point.matrix.is_stored_here:
                self.store.change(name, value)
        with_factors(inputs, factors)

    def finish(self) -> None:
        """Weights whose inputs no pass has shown."""
        left = [matrix for matrix in self.matrices if matrix.name not in self.reports]
        with recorded_inputs(left, moments=False, sums=False) as statistics:
            pass
        for matrix in left:
            self._quantize(matrix, statistics[matrix.name])

    def _quantize(self, matrix: Matrix, statistics: Any) -> None:
        weight, values, report = self.calibration.calibrate(matrix, statistics, self.stored[MODEL + matrix.name])
        matrix.put(values)
        if matrix.is_stored_here:
            self.store.put(matrix.name, weight, matrix.expert_axis.rank)
        self.reports[matrix.name] = report
        self.progress(len(self.reports), len(self.matrices))


def _of_all_ranks(reports: Mapping[str, WeightReport], trained: TrainedModel) -> list[WeightReport]:
    """Each weight once; experts of several ranks together."""
    merged: dict[str, WeightReport] = {}
    for of_rank in all_gather_objects(dict(reports), trained.ctx.world):
        for name, report in of_rank.items():
            if name in merged:
                merged[name].unseen |= report.unseen
            else:
                merged[name] = report
    return sorted(merged.values(), key=lambda report: _place(report.name))


def _place(name: str) -> list[tuple[int, str]]:
    """Numbers of layers in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def result_path(path: Path) -> Path:
    """Raises ConfigError for a folder that is there already."""
    if path.exists():
        raise ConfigError(f"--out {path} exists; give a folder that does not")
    return path
