"""Metrics of losses of answers, collected in a pass and reduced at lines of the log and after evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import all_gather_objects

Reduction = Literal["mean", "sum", "max", "min"]
Values = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> (values, which of them there are), both of one shape."""


class CollectedMetrics:
    """(name, value, reduction) of training, and the same over a validation set. reductions: of names whose values are
    not averaged. Values are taken later: to look up which of them there are would wait for the device."""

    def __init__(self, parallel: ParallelContext, reductions: Mapping[str, Reduction] | None = None) -> None:
        self.parallel, self.reductions = parallel, reductions or {}
        self._recorded: list[Values] = []
        self._evaluated: list[Values] = []

    def add(self, values: Values) -> None:
        """Add values of training where gradients are enabled, else of evaluation."""
        (self._recorded if torch.is_grad_enabled() else self._evaluated).append(values)

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        """Values of training since the last call."""
        # Other ranks of a context-parallel group have the same answers, and a mean counts them equally.
        taken, self._recorded = self._recorded, []
        return [
            (name, value, self.reductions.get(name, "mean"))
            for values in taken
            for name, (all_values, exists) in values.items()
            for value in all_values[exists].tolist()
        ]

    def take_metrics(self) -> dict[str, float]:
        """Means of evaluation over all ranks. Collective over the world."""
        taken, self._evaluated = self._evaluated, []
        local_values: dict[str, list[float]] = {}
        for values in taken:
            for name, (all_values, exists) in values.items():
                local_values.setdefault(name, []).extend(all_values[exists].tolist())
        # Ranks without the last pipeline stage have none; those that share a model have the same values.
        gathered: dict[str, list[float]] = {}
        for of_rank in all_gather_objects(local_values, self.parallel.world):
            for name, of_name in of_rank.items():
                gathered.setdefault(name, []).extend(of_name)
        return {name: self._reduced(name, values) for name, values in gathered.items() if values}

    def _reduced(self, name: str, values: list[float]) -> float:
        reduction = self.reductions.get(name, "mean")
        if reduction == "mean":
            return sum(values) / len(values)
        if reduction == "sum":
            return sum(values)
        return max(values) if reduction == "max" else min(values)


def largest_difference(policy: Tensor, reference: Tensor, exists: Tensor) -> float:
    """The largest |log pi - log pi_ref| of an answer over |log pi_ref|; 0 without a reference, and without an
    answer."""
    relative = ((policy.detach() - reference).abs() / reference.abs().clamp(min=1.0))[exists & (reference != 0)]
    return float(relative.max()) if relative.numel() else 0.0
